"""Golden graphs: what writes through views become. Each was read by a human.

The text is the graph of ``remove="mutations"``; with views removed it must be the same graph by copies.
Regenerate with ``EXPECTTEST_ACCEPT=1``, and read the difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.golden import Golden


class ThroughOneView(Golden):
    """A write through each kind of view of an intermediate."""

    def test_no_view(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y.add_(2)
            return y * 3

        self.traced(f, torch.zeros(3)).reads("""\
add = add.Tensor(x_1, 1)
add_1 = add.Tensor(add, 2)
mul = mul.Tensor(add_1, 3)
return mul""")

    def test_view(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y.view(4, 3).add_(2)
            return y

        self.traced(f, torch.zeros(3, 4)).reads("""\
add = add.Tensor(x_1, 1)
view = view.default(add, [4, 3])
add_1 = add.Tensor(view, 2)
view_1 = view.default(add_1, [3, 4])
return view_1""")

    def test_select(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y[1].add_(2)
            return y

        self.traced(f, torch.zeros(3, 4)).reads("""\
add = add.Tensor(x_1, 1)
select = select.int(add, 0, 1)
add_1 = add.Tensor(select, 2)
select_scatter = select_scatter.default(add, add_1, 0, 1)
return select_scatter""")

    def test_slice(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y[:, 1:3].mul_(2)
            return y

        self.traced(f, torch.zeros(3, 4)).reads("""\
add = add.Tensor(x_1, 1)
slice_1 = slice.Tensor(add, 1, 1, 3)
mul = mul.Tensor(slice_1, 2)
slice_scatter = slice_scatter.default(add, mul, 1, 1, 3)
return slice_scatter""")

    def test_t(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y.t().add_(2)
            return y

        self.traced(f, torch.zeros(3, 4)).reads("""\
add = add.Tensor(x_1, 1)
t = t.default(add)
add_1 = add.Tensor(t, 2)
t_1 = t.default(add_1)
return t_1""")

    def test_diagonal(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y.diagonal().add_(2)
            return y

        self.traced(f, torch.zeros(3, 4)).reads("""\
add = add.Tensor(x_1, 1)
diagonal = diagonal.default(add)
add_1 = add.Tensor(diagonal, 2)
diagonal_scatter = diagonal_scatter.default(add, add_1)
return diagonal_scatter""")

    def test_unfold_with_gaps(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y.unfold(0, 2, 3).add_(2)
            return y

        self.traced(f, torch.zeros(8)).reads("""\
add = add.Tensor(x_1, 1)
unfold = unfold.default(add, 0, 2, 3)
add_1 = add.Tensor(unfold, 2)
select = select.int(add_1, -1, 1)
slice_scatter = slice_scatter.default(add, select, 0, 1, 8, 3)
select_1 = select.int(add_1, -1, 0)
slice_scatter_1 = slice_scatter.default(slice_scatter, select_1, 0, 0, 7, 3)
return slice_scatter_1""")

    def test_read_through_expand(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            wide = y.expand(3, 4)
            y.add_(1)
            return wide * 2

        self.traced(f, torch.zeros(3, 1)).reads("""\
add = add.Tensor(x_1, 1)
add_1 = add.Tensor(add, 1)
expand = expand.default(add_1, [3, 4])
mul = mul.Tensor(expand, 2)
return mul""")

    def test_as_strided(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y.as_strided((2, 2), (6, 1), 1).add_(2)
            return y

        self.traced(f, torch.zeros(12)).reads("""\
add = add.Tensor(x_1, 1)
as_strided = as_strided.default(add, [2, 2], [6, 1], 1)
add_1 = add.Tensor(as_strided, 2)
as_strided_scatter = as_strided_scatter.default(add, add_1, [2, 2], [6, 1], 1)
return as_strided_scatter""")

    def test_view_dtype(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y.view(torch.int32).bitwise_or_(1)
            return y

        self.traced(f, torch.zeros(4)).reads("""\
add = add.Tensor(x_1, 1)
view = view.dtype(add, torch.int32)
bitwise_or = bitwise_or.Scalar(view, 1)
view_1 = view.dtype(bitwise_or, torch.float32)
return view_1""")

    def test_view_as_real(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            torch.view_as_real(y).add_(2)
            return y

        self.traced(f, torch.zeros(4, dtype=torch.complex64)).reads("""\
add = add.Tensor(x_1, 1)
view_as_real = view_as_real.default(add)
add_1 = add.Tensor(view_as_real, 2)
view_as_complex = view_as_complex.default(add_1)
return view_as_complex""")

    def test_imag(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y.imag.add_(1)
            return y

        self.traced(f, torch.zeros(4, dtype=torch.complex64)).reads("""\
add = add.Tensor(x_1, 1)
view_as_real = view_as_real.default(add)
select = select.int(view_as_real, 1, 1)
add_1 = add.Tensor(select, 1)
select_scatter = select_scatter.default(view_as_real, add_1, 1, 1)
view_as_complex = view_as_complex.default(select_scatter)
return view_as_complex""")

    def test_conj(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y.conj().copy_(x)
            return y * 2

        self.traced(f, torch.zeros(4, dtype=torch.complex64)).reads("""\
_conj_copy = _conj_copy.default(x_1)
mul = mul.Tensor(_conj_copy, 2)
return mul""")

    def test_detach_is_no_step(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y.detach().add_(1)
            return y

        self.traced(f, torch.zeros(3)).reads("""\
add = add.Tensor(x_1, 1)
add_1 = add.Tensor(add, 1)
return add_1""")

    def test_contiguous_copy_is_apart(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x.t().contiguous()
            y.add_(1)
            return y

        self.traced(f, torch.zeros(3, 4)).reads("""\
t = t.default(x_1)
clone = clone.default(t, memory_format=torch.contiguous_format)
add = add.Tensor(clone, 1)
return add""")


class ThroughSeveralViews(Golden):
    """Pieces of one base: those that lie side by side are joined, those that lie apart do not meet."""

    def test_two_of_three_pieces(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            first, _, last = y.split(2)
            first.add_(1)
            last.mul_(2)
            return y

        self.traced(f, torch.zeros(6)).reads("""\
add = add.Tensor(x_1, 1)
slice_1 = slice.Tensor(add, 0, 0, 2)
add_1 = add.Tensor(slice_1, 1)
slice_2 = slice.Tensor(add, 0, 4, 6)
mul = mul.Tensor(slice_2, 2)
slice_scatter = slice_scatter.default(add, add_1, 0, 0, 2)
slice_scatter_1 = slice_scatter.default(slice_scatter, mul, 0, 4, 6)
return slice_scatter_1""")

    def test_all_pieces_become_one_cat(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            for number, piece in enumerate(y.split([1, 3, 2])):
                piece.add_(number)
            return y

        self.traced(f, torch.zeros(6)).reads("""\
add = add.Tensor(x_1, 1)
slice_1 = slice.Tensor(add, 0, 0, 1)
add_1 = add.Tensor(slice_1, 0)
slice_2 = slice.Tensor(add, 0, 1, 4)
add_2 = add.Tensor(slice_2, 1)
slice_3 = slice.Tensor(add, 0, 4, 6)
add_3 = add.Tensor(slice_3, 2)
cat = cat.default([add_1, add_2, add_3])
return cat""")

    def test_one_chunk_from_the_other(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            first, second = y.chunk(2)
            first.add_(second)
            return y

        self.traced(f, torch.zeros(6)).reads("""\
add = add.Tensor(x_1, 1)
slice_1 = slice.Tensor(add, 0, 0, 3)
slice_2 = slice.Tensor(add, 0, 3, 6)
add_1 = add.Tensor(slice_1, slice_2)
slice_scatter = slice_scatter.default(add, add_1, 0, 0, 3)
return slice_scatter""")

    def test_unbind_becomes_one_stack(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            for number, column in enumerate(y.unbind(1)):
                column.add_(number)
            return y

        self.traced(f, torch.zeros(3, 2)).reads("""\
add = add.Tensor(x_1, 1)
select = select.int(add, 1, 0)
add_1 = add.Tensor(select, 0)
select_1 = select.int(add, 1, 1)
add_2 = add.Tensor(select_1, 1)
stack = stack.default([add_1, add_2], 1)
return stack""")

    def test_fill_row_by_row(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = torch.empty_like(x)
            for row in range(3):
                y[row] = x[row] * row
            return y

        self.traced(f, torch.zeros(3, 4)).reads("""\
select = select.int(x_1, 0, 0)
mul = mul.Tensor(select, 0)
select_1 = select.int(x_1, 0, 1)
mul_1 = mul.Tensor(select_1, 1)
select_2 = select.int(x_1, 0, 2)
mul_2 = mul.Tensor(select_2, 2)
stack = stack.default([mul, mul_1, mul_2])
return stack""")

    def test_partial_fill(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = torch.zeros(5, 4)
            for row in range(1, 4):
                y[row].copy_(x[row])
            return y

        self.traced(f, torch.zeros(5, 4)).reads("""\
zeros = zeros.default([5, 4])
select = select.int(x_1, 0, 1)
select_1 = select.int(x_1, 0, 2)
select_2 = select.int(x_1, 0, 3)
stack = stack.default([select, select_1, select_2])
slice_scatter = slice_scatter.default(zeros, stack, 0, 1, 4)
return slice_scatter""")

    def test_fill_with_gaps(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = torch.zeros(5, 4)
            y[0] = x[1]
            y[2] = x[3]
            return y

        self.traced(f, torch.zeros(5, 4)).reads("""\
zeros = zeros.default([5, 4])
select = select.int(x_1, 0, 1)
select_1 = select.int(x_1, 0, 3)
select_scatter = select_scatter.default(zeros, select, 0, 0)
select_scatter_1 = select_scatter.default(select_scatter, select_1, 0, 2)
return select_scatter_1""")

    def test_disjoint_regions_do_not_disturb_one_another(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            top, bottom = y[0], y[1]
            top.add_(1)
            bottom.mul_(2)
            return top * bottom

        self.traced(f, torch.zeros(4, 4)).reads("""\
add = add.Tensor(x_1, 1)
select = select.int(add, 0, 0)
add_1 = add.Tensor(select, 1)
select_1 = select.int(add, 0, 1)
mul = mul.Tensor(select_1, 2)
mul_1 = mul.Tensor(add_1, mul)
return mul_1""")

    def test_meeting_regions_do(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            row, column = y[0], y[:, 1]
            row.add_(1)
            return column * 2

        self.traced(f, torch.zeros(4, 4)).reads("""\
add = add.Tensor(x_1, 1)
select = select.int(add, 0, 0)
add_1 = add.Tensor(select, 1)
select_scatter = select_scatter.default(add, add_1, 0, 0)
select_1 = select.int(select_scatter, 1, 1)
mul = mul.Tensor(select_1, 2)
return mul""")

    def test_swapped_rows(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            kept = y[0].clone()
            y[0] = y[1]
            y[1] = kept
            return y

        self.traced(f, torch.zeros(3, 4)).reads("""\
add = add.Tensor(x_1, 1)
select = select.int(add, 0, 0)
clone = clone.default(select)
select_1 = select.int(add, 0, 1)
stack = stack.default([select_1, clone])
slice_scatter = slice_scatter.default(add, stack, 0, 0, 2)
return slice_scatter""")

    def test_overwritten_whole_after_a_row(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y[0].add_(1)
            y.zero_()
            y[1].fill_(2)
            return y

        self.traced(f, torch.zeros(3, 4)).reads("""\
full = full.default([3, 4], 0, dtype=torch.float32)
full_1 = full.default([4], 2, dtype=torch.float32)
select_scatter = select_scatter.default(full, full_1, 0, 1)
return select_scatter""")

    def test_whole_overwrite_needs_no_scatter(self) -> None:
        def f(x: Tensor, new: Tensor) -> Tensor:
            y = x + 1
            y[:] = new
            return y * 2

        self.traced(f, torch.zeros(3, 4), torch.ones(3, 4)).reads("""\
mul = mul.Tensor(new_1, 2)
return mul""")

    def test_whole_update_of_an_updated_row(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y[0].add_(1)
            y.mul_(2)
            return y

        self.traced(f, torch.zeros(3, 4)).reads("""\
add = add.Tensor(x_1, 1)
select = select.int(add, 0, 0)
add_1 = add.Tensor(select, 1)
select_scatter = select_scatter.default(add, add_1, 0, 0)
mul = mul.Tensor(select_scatter, 2)
return mul""")

    def test_there_and_back_is_no_view(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y.transpose(0, 1).unsqueeze(0).squeeze(0).transpose(0, 1).add_(1)
            return y

        self.traced(f, torch.zeros(3, 4)).reads("""\
add = add.Tensor(x_1, 1)
add_1 = add.Tensor(add, 1)
return add_1""")

    def test_chain_collapses(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            end = y.transpose(0, 1).unsqueeze(0).squeeze(0).transpose(0, 1)[1][2].unsqueeze(0).squeeze(0)
            end.add_(1)
            return y

        self.traced(f, torch.zeros(2, 3, 4)).reads("""\
add = add.Tensor(x_1, 1)
select = select.int(add, 0, 1)
select_1 = select.int(select, 0, 2)
add_1 = add.Tensor(select_1, 1)
select_scatter = select_scatter.default(select, add_1, 0, 2)
select_scatter_1 = select_scatter.default(add, select_scatter, 0, 1)
return select_scatter_1""")
