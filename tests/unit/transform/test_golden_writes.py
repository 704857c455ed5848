"""Golden graphs: what mutating operators and changed inputs become. Each was read by a human.

See ``test_golden`` for how to read and regenerate them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.golden import Golden


class MutatingOperators(Golden):
    """In-place, ``out=`` and mutable operators on intermediates."""

    def test_fills(self) -> None:
        def f(x: Tensor) -> tuple[Tensor, Tensor]:
            y, z = x + 1, x + 2
            y.zero_()
            z[0].fill_(7)
            return y, z

        self.traced(f, torch.zeros(2, 3)).reads("""\
add_1 = add.Tensor(x_1, 2)
full = full.default([2, 3], 0, dtype=torch.float32)
full_1 = full.default([3], 7, dtype=torch.float32)
select_scatter = select_scatter.default(add_1, full_1, 0, 0)
return (full, select_scatter)""")

    def test_fill_with_a_tensor(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y.fill_(x[0])
            return y

        self.traced(f, torch.zeros(3)).reads("""\
add = add.Tensor(x_1, 1)
select = select.int(x_1, 0, 0)
fill = fill.Tensor(add, select)
return fill""")

    def test_copy_converts_and_broadcasts(self) -> None:
        def f(x: Tensor, new: Tensor) -> Tensor:
            y = x + 1
            y.copy_(new)
            return y * 2

        self.traced(f, torch.zeros(2, 3), torch.ones(3, dtype=torch.int64)).reads("""\
_to_copy = _to_copy.default(new_1, dtype=torch.float32)
expand = expand.default(_to_copy, [2, 3])
mul = mul.Tensor(expand, 2)
return mul""")

    def test_copied_value_is_that_of_the_time(self) -> None:
        def f(x: Tensor, source: Tensor) -> Tensor:
            y = x + 1
            y.copy_(source)
            source.add_(1)
            return y

        self.traced(f, torch.zeros(3), torch.ones(3)).reads("""\
add_1 = add.Tensor(source_1, 1)
clone = clone.default(source_1)
copy_ = copy_.default(source_1, add_1)
return clone""")

    def test_result_of_another_dtype_is_cast(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y.ge_(0)
            return y

        self.traced(f, torch.zeros(3)).reads("""\
add = add.Tensor(x_1, 1)
ge = ge.Scalar(add, 0)
_to_copy = _to_copy.default(ge, dtype=torch.float32)
return _to_copy""")

    def test_chained(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            return y.relu_().mul_(2).clamp_(0, 1)

        self.traced(f, torch.zeros(3)).reads("""\
add = add.Tensor(x_1, 1)
relu = relu.default(add)
mul = mul.Tensor(relu, 2)
clamp = clamp.default(mul, 0, 1)
return clamp""")

    def test_index_put(self) -> None:
        def f(x: Tensor, index: Tensor, new: Tensor) -> Tensor:
            y = x + 1
            y[:, index] = new
            return y

        self.traced(f, torch.zeros(3, 4), torch.tensor([0, 2]), torch.ones(3, 2)).reads("""\
add = add.Tensor(x_1, 1)
index_put = index_put.default(add, [None, index_1], new_1)
return index_put""")

    def test_masked_fill(self) -> None:
        def f(x: Tensor, mask: Tensor) -> Tensor:
            y = x + 1
            y.masked_fill_(mask, 5)
            return y

        self.traced(f, torch.zeros(3), torch.tensor([True, False, True])).reads("""\
add = add.Tensor(x_1, 1)
masked_fill = masked_fill.Scalar(add, mask_1, 5)
return masked_fill""")

    def test_dropout(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            return F.dropout(y, 0.5, training=True, inplace=True)

        self.traced(f, torch.zeros(3)).reads("""\
add = add.Tensor(x_1, 1)
empty_like = empty_like.default(add)
bernoulli = bernoulli.p(empty_like, 0.5)
div = div.Scalar(bernoulli, 0.5)
mul = mul.Tensor(add, div)
return mul""")

    def test_random_numbers_are_drawn_in_order(self) -> None:
        def f(x: Tensor) -> tuple[Tensor, Tensor]:
            y, z = x + 1, x + 2
            z.uniform_()
            y.bernoulli_(0.5)
            return y, z

        self.traced(f, torch.zeros(3)).reads("""\
add = add.Tensor(x_1, 1)
add_1 = add.Tensor(x_1, 2)
uniform = uniform.default(add_1)
bernoulli = bernoulli.p(add, 0.5)
return (bernoulli, uniform)""")

    def test_out(self) -> None:
        def f(x: Tensor) -> Tensor:
            out = torch.empty(3)
            torch.add(x, 1, out=out)
            return out

        self.traced(f, torch.zeros(3)).reads("""\
add = add.Tensor(x_1, 1)
return add""")

    def test_out_resized(self) -> None:
        def f(x: Tensor) -> Tensor:
            out = torch.empty(0)
            torch.add(x, 1, out=out)
            return out

        self.traced(f, torch.zeros(3)).reads("""\
add = add.Tensor(x_1, 1)
return add""")

    def test_out_of_a_composite(self) -> None:
        def f(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            out = torch.empty(2, 3, 5)
            torch.ops.aten.linear.out(x, weight, bias, out=out)
            return out

        self.traced(f, torch.zeros(2, 3, 4), torch.ones(5, 4), torch.ones(5)).reads("""\
view = view.default(x_1, [6, 4])
t = t.default(weight_1)
addmm = addmm.default(bias_1, view, t)
view_1 = view.default(addmm, [2, 3, 5])
return view_1""")

    def test_out_is_a_part(self) -> None:
        def f(x: Tensor) -> Tensor:
            rows = torch.zeros(2, 3)
            torch.sum(x, 1, out=rows[0])
            return rows

        self.traced(f, torch.zeros(3, 4)).reads("""\
zeros = zeros.default([2, 3])
sum_1 = sum.dim_IntList(x_1, [1])
select_scatter = select_scatter.default(zeros, sum_1, 0, 0)
return select_scatter""")

    def test_two_outs(self) -> None:
        def f(x: Tensor) -> tuple[Tensor, Tensor]:
            low, high = torch.empty(4), torch.empty(4)
            torch.aminmax(x, dim=0, out=(low, high))
            return low, high

        self.traced(f, torch.zeros(3, 4)).reads("""\
aminmax = aminmax.default(x_1, dim=0)
getitem = aminmax[0]
getitem_1 = aminmax[1]
return (getitem, getitem_1)""")

    def test_foreach(self) -> None:
        def f(one: Tensor, two: Tensor) -> Tensor:
            torch._foreach_add_([one, two], 1)
            torch._foreach_mul_([one, two], [one, one])
            return one.sum()

        self.traced(f, torch.zeros(3), torch.ones(3)).reads("""\
_foreach_add = _foreach_add.Scalar([one_1, two_1], 1)
getitem = _foreach_add[0]
getitem_1 = _foreach_add[1]
_foreach_mul = _foreach_mul.List([getitem], [getitem])
getitem_2 = _foreach_mul[0]
_foreach_mul_1 = _foreach_mul.List([getitem_1], [getitem_2])
getitem_3 = _foreach_mul_1[0]
sum_1 = sum.default(getitem_2)
copy_ = copy_.default(one_1, getitem_2)
copy__1 = copy_.default(two_1, getitem_3)
return sum_1""")

    def test_fused_adamw_without_amsgrad(self) -> None:
        def f(weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, step: Tensor) -> None:
            rates: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-8}
            torch._fused_adamw_([weight], [grad], [mean], [square], [], [step], **rates, amsgrad=False, maximize=False)

        state = [torch.ones(2) for _ in range(4)]
        self.traced(f, *state, torch.tensor(1.0)).reads("""\
_fused_adamw = _fused_adamw.default([weight_1], [grad_1], [mean_1], [square_1], [], [step_1], lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.01, eps=1e-08, amsgrad=False, maximize=False)
getitem = _fused_adamw[0]
getitem_1 = getitem[0]
getitem_2 = _fused_adamw[1]
getitem_3 = getitem_2[0]
getitem_4 = _fused_adamw[2]
getitem_5 = getitem_4[0]
getitem_6 = _fused_adamw[3]
getitem_7 = getitem_6[0]
copy_ = copy_.default(weight_1, getitem_1)
copy__1 = copy_.default(grad_1, getitem_3)
copy__2 = copy_.default(mean_1, getitem_5)
copy__3 = copy_.default(square_1, getitem_7)
return None""")

    def test_batch_norm_writes_its_statistics(self) -> None:
        def f(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
            return F.batch_norm(x, mean, variance, training=True)

        self.traced(f, torch.randn(2, 3, 4), torch.zeros(3), torch.ones(3)).reads("""\
_native_batch_norm_legit_functional = _native_batch_norm_legit_functional.default(x_1, None, None, mean_1, variance_1, True, 0.1, 1e-05)
getitem = _native_batch_norm_legit_functional[0]
getitem_3 = _native_batch_norm_legit_functional[3]
getitem_4 = _native_batch_norm_legit_functional[4]
copy_ = copy_.default(mean_1, getitem_3)
copy__1 = copy_.default(variance_1, getitem_4)
return getitem""")

    def test_batch_norm_in_evaluation_writes_nothing(self) -> None:
        def f(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
            return F.batch_norm(x, mean, variance, training=False)

        self.traced(f, torch.randn(2, 3, 4), torch.zeros(3), torch.ones(3)).reads("""\
native_batch_norm = native_batch_norm.default(x_1, None, None, mean_1, variance_1, False, 0.1, 1e-05)
getitem = native_batch_norm[0]
return getitem""")


class MetadataMutations(Golden):
    """In-place views and ``resize_``."""

    def test_inplace_views(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y.squeeze_(1).t_()
            y.mul_(2)
            y.unsqueeze_(0).transpose_(0, 1)
            return y.add_(1)

        self.traced(f, torch.zeros(3, 1, 4)).reads("""\
add = add.Tensor(x_1, 1)
squeeze = squeeze.dim(add, 1)
t = t.default(squeeze)
mul = mul.Tensor(t, 2)
unsqueeze = unsqueeze.default(mul, 1)
add_1 = add.Tensor(unsqueeze, 1)
return add_1""")

    def test_inplace_view_of_an_input(self) -> None:
        def f(x: Tensor) -> Tensor:
            x.t_()
            return x * 2

        self.traced(f, torch.zeros(3, 4)).reads("""\
t = t.default(x_1)
mul = mul.Tensor(t, 2)
as_strided_ = as_strided_.default(x_1, [4, 3], [1, 4])
return mul""")

    def test_inplace_view_of_an_input_that_is_written(self) -> None:
        def f(x: Tensor) -> None:
            x.unsqueeze_(0)
            x.mul_(2)

        self.traced(f, torch.zeros(3, 4)).reads("""\
unsqueeze = unsqueeze.default(x_1, 0)
mul = mul.Tensor(unsqueeze, 2)
as_strided_ = as_strided_.default(x_1, [1, 3, 4], [12, 4, 1])
copy_ = copy_.default(x_1, mul)
return None""")

    def test_resize_to_less(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y.resize_(2, 2)
            return y.add_(1)

        self.traced(f, torch.zeros(8)).reads("""\
add = add.Tensor(x_1, 1)
as_strided = as_strided.default(add, [2, 2], [2, 1])
add_1 = add.Tensor(as_strided, 1)
return add_1""")

    def test_resize_to_more(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x + 1
            y.resize_(12)
            return y.fill_(1)

        self.traced(f, torch.zeros(8)).reads("""\
full = full.default([12], 1, dtype=torch.float32)
return full""")

    def test_resize_of_an_input(self) -> None:
        def f(x: Tensor) -> Tensor:
            x.resize_(4)
            x.add_(1)
            return x * 2

        self.traced(f, torch.zeros(8)).reads("""\
as_strided = as_strided.default(x_1, [4], [1])
add = add.Tensor(as_strided, 1)
mul = mul.Tensor(add, 2)
as_strided_ = as_strided_.default(x_1, [4], [1])
copy_ = copy_.default(x_1, add)
return mul""")


class ChangedInputs(Golden):
    """Write-backs: last, in input order, for changed inputs alone."""

    def test_cache_write(self) -> None:
        def f(keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys[:, 2:4].copy_(key)
            values[:, 2:4].copy_(value)
            return keys[:, :4] * values[:, :4]

        cache, new = torch.zeros(1, 8, 4), torch.ones(1, 2, 4)
        self.traced(f, cache, cache.clone(), new, new.clone()).reads("""\
slice_scatter = slice_scatter.default(keys_1, key_1, 1, 2, 4)
slice_1 = slice.Tensor(slice_scatter, 1, 0, 4)
slice_scatter_1 = slice_scatter.default(values_1, value_1, 1, 2, 4)
slice_2 = slice.Tensor(slice_scatter_1, 1, 0, 4)
mul = mul.Tensor(slice_1, slice_2)
copy_ = copy_.default(keys_1, slice_scatter)
copy__1 = copy_.default(values_1, slice_scatter_1)
return mul""")

    def test_changed_and_returned(self) -> None:
        def f(x: Tensor) -> Tensor:
            x.add_(1)
            return x

        self.traced(f, torch.zeros(3)).reads("""\
add = add.Tensor(x_1, 1)
copy_ = copy_.default(x_1, add)
return copy_""")

    def test_changed_part_returned(self) -> None:
        def f(x: Tensor) -> Tensor:
            part = x[:2]
            part.add_(1)
            return part

        self.traced(f, torch.zeros(3)).reads("""\
slice_1 = slice.Tensor(x_1, 0, 0, 2)
add = add.Tensor(slice_1, 1)
slice_scatter = slice_scatter.default(x_1, add, 0, 0, 2)
copy_ = copy_.default(x_1, slice_scatter)
return add""")

    def test_unchanged_inputs_are_not_written(self) -> None:
        def f(x: Tensor, y: Tensor) -> Tensor:
            return (x.view(-1) + y[:]).add_(1)

        self.traced(f, torch.zeros(3), torch.zeros(3)).reads("""\
view = view.default(x_1, [-1])
add = add.Tensor(view, y_1)
add_1 = add.Tensor(add, 1)
return add_1""")

    def test_write_backs_in_input_order(self) -> None:
        def f(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            z.add_(1)
            x.mul_(2)
            return y + 1

        self.traced(f, torch.zeros(3), torch.zeros(3), torch.zeros(3)).reads("""\
add = add.Tensor(z_1, 1)
mul = mul.Tensor(x_1, 2)
add_1 = add.Tensor(y_1, 1)
copy_ = copy_.default(x_1, mul)
copy__1 = copy_.default(z_1, add)
return add_1""")

    def test_disjoint_part_of_a_changed_input(self) -> None:
        def f(x: Tensor) -> Tensor:
            row, other = x[0], x[1]
            row.add_(1)
            return other * 2

        self.traced(f, torch.zeros(4, 4)).reads("""\
select = select.int(x_1, 0, 0)
add = add.Tensor(select, 1)
select_1 = select.int(x_1, 0, 1)
mul = mul.Tensor(select_1, 2)
select_scatter = select_scatter.default(x_1, add, 0, 0)
copy_ = copy_.default(x_1, select_scatter)
return mul""")

    def test_out_is_an_input(self) -> None:
        def f(x: Tensor) -> Tensor:
            return torch.add(x, 1, out=x)

        self.traced(f, torch.zeros(3)).reads("""\
add = add.Tensor(x_1, 1)
copy_ = copy_.default(x_1, add)
return copy_""")

    def test_exchanged_inputs(self) -> None:
        def f(x: Tensor, y: Tensor) -> None:
            kept = x.clone()
            x.copy_(y)
            y.copy_(kept)

        self.traced(f, torch.zeros(3), torch.ones(3)).reads("""\
clone = clone.default(x_1)
clone_1 = clone.default(y_1)
copy_ = copy_.default(x_1, clone_1)
copy__1 = copy_.default(y_1, clone)
return None""")

    def test_data_of_an_input(self) -> None:
        def f(x: Tensor) -> Tensor:
            x.data.add_(1)
            return x * 2

        self.traced(f, torch.zeros(3)).reads("""\
add = add.Tensor(x_1, 1)
mul = mul.Tensor(add, 2)
copy_ = copy_.default(x_1, add)
return mul""")

    def test_nothing_but_a_write(self) -> None:
        def f(x: Tensor) -> None:
            x[0].add_(1)

        self.traced(f, torch.zeros(2, 2)).reads("""\
select = select.int(x_1, 0, 0)
add = add.Tensor(select, 1)
select_scatter = select_scatter.default(x_1, add, 0, 0)
copy_ = copy_.default(x_1, select_scatter)
return None""")

    def test_one_input_twice(self) -> None:
        def f(x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            return y * 2

        shared = torch.zeros(3)
        self.traced(f, shared, shared).reads("""\
add = add.Tensor(y_1, 1)
mul = mul.Tensor(add, 2)
copy_ = copy_.default(y_1, add)
return mul""")

    def test_overlapping_inputs(self) -> None:
        def f(x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            return y * 2

        shared = torch.zeros(6)
        self.traced(f, shared[:4], shared[2:]).reads("""\
add = add.Tensor(x_1, 1)
as_strided_copy = as_strided_copy.default(x_1, [6], [1], 0)
as_strided_scatter = as_strided_scatter.default(as_strided_copy, add, [4], [1])
as_strided = as_strided.default(as_strided_scatter, [4], [1], 2)
mul = mul.Tensor(as_strided, 2)
copy_ = copy_.default(x_1, add)
copy__1 = copy_.default(y_1, as_strided)
return mul""")
