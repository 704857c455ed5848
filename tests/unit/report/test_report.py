"""The report of a captured program: its data, its page, and the page in a browser.

The browser's tests are skipped where none is on PATH; `apt-get install chromium` brings one.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functionalize import capture
from functionalize.report import Report, build, page
from functionalize.report.code import place_of
from functionalize.report.folds import LANES, ROWS, Fold, clustered, folded
from functionalize.report.lanes import Picture, drawn
from functionalize.report.model import Node, Storage, View, Write
from functionalize.runtime.calls.program import CapturedProgram
from tests.support.browser import Browser, installed
from tests.support.models import MODELS

VOID = {"meta", "link", "input", "br", "hr", "img"}
HOSTILE = "<script>alert(1)</script>"


def edit(table: Tensor, x: Tensor) -> Tensor:
    rows = table.view(4, 6)
    rows[1].add_(x)
    inside = torch.zeros(4)
    inside[1:3].fill_(1)
    return rows.sum() + inside.sum()


class Block(nn.Module):
    """A decoding step that writes one row of a cache."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project, self.norm, self.up = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)
        self.cache: Tensor
        self.register_buffer("cache", torch.zeros(8, width))

    def forward(self, x: Tensor) -> Tensor:
        self.cache[3] = self.project(self.norm(x))[0]
        scores = (x @ self.cache.t()).softmax(-1) @ self.cache
        return x + torch.relu_(self.up(scores)).mul_(2)


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def deep(depth: int) -> Report:
    with torch.no_grad():
        return build(capture(Deep(depth).eval(), (torch.ones(1, 4),)))


@pytest.fixture(scope="module")
def edited() -> Report:
    return build(capture(edit, (torch.zeros(6, 4), torch.ones(6))))


@pytest.fixture(scope="module")
def real() -> dict[str, Report]:
    """The reports of whole programs."""
    names = ("kv-cache-decode", "resnet-step-sgd-single", "state-space-loop")
    programs = {model.name: model.build() for model in MODELS if model.name in names}
    return {name: report_of(capture(func, inputs)) for name, (func, inputs) in programs.items()}


def report_of(program: CapturedProgram) -> Report:
    """What `program.report` draws."""
    return build(program, "", program._metadata_writes(), program._recorded.shared)


# Data


def test_storages_tell_of_views_and_writes(edited: Report) -> None:
    table = next(storage for storage in edited.storages if storage.name == "table")
    assert (table.kind, table.look, table.bytes, table.group) == ("input", "f32[6,4]", 96, "written back")
    assert [view.op for view in table.views] == ["", "aten.view.default", "aten.select.int"]
    assert [view.parent for view in table.views] == [None, 0, 1]
    (write,) = table.writes
    assert (write.op, write.region) == ("aten.add_.Tensor", "f32[6] at 6")
    assert text(edited, write.line) == "rows[1].add_(x)"
    (back,) = table.backs
    assert back.node is not None and edited.nodes[back.node].name == back.value
    inside = next(storage for storage in edited.storages if storage.name == "zeros")
    assert (inside.kind, inside.group, inside.backs) == ("intermediate", "written inside", ())


def test_counts_and_sizes(edited: Report) -> None:
    assert (edited.views, edited.writes, edited.backs) == (3, 2, 1)
    amounts = {amount.label: (amount.tensors, amount.bytes) for amount in edited.amounts}
    back = edited.storages[0].backs[0].bytes
    assert amounts == {"inputs": (2, 120), "state": (0, 0), "written back": (1, back), "returned": (1, 4)}


def test_the_table_of_mutations_names_the_line(edited: Report) -> None:
    (row,) = edited.mutations
    assert (row.target, row.op, row.region, row.bytes) == ("table", "aten.add_.Tensor", "f32[6] at 6", 24)
    assert text(edited, row.line) == "rows[1].add_(x)"


def test_nodes_and_lines_are_linked_both_ways(real: dict[str, Report], edited: Report) -> None:
    for report in (*real.values(), edited):
        for node in report.nodes:
            if node.chain is not None:
                assert node.number in report.lines[report.chains[node.chain][-1]].nodes
        for line in report.lines.values():
            for number in line.nodes:
                chain = report.nodes[number].chain
                assert chain is not None and report.chains[chain][-1] == line.number


def test_lines_that_call_know_what_came_of_it() -> None:
    report = deep(2)
    call = next(line for line in report.lines.values() if line.text.strip() == "x = block(x)")
    assert not call.nodes and call.through == report.ops


def test_state_is_named_as_in_the_module() -> None:
    report = deep(2)
    written = {storage.name: storage for storage in report.storages if storage.backs}
    assert set(written) == {"blocks.0.cache", "blocks.1.cache"}
    assert {storage.kind for storage in written.values()} == {"buffer"}
    assert report.title == "Deep" and edit_title() == "edit"


def edit_title() -> str:
    return build(capture(edit, (torch.zeros(6, 4), torch.ones(6)))).title


def test_a_write_back_of_a_part_says_so() -> None:
    (back,) = next(storage for storage in deep(1).storages if storage.backs).backs
    assert (back.region, back.bytes) == ("f32[4] of f32[8,4]", 16)


def test_inputs_in_one_storage_are_one_lane_with_all_its_write_backs(tmp_path: Path) -> None:
    """Both halves of a storage are written, one through each input."""

    def program(left: Tensor, right: Tensor) -> None:
        left.add_(1)
        right.mul_(2)

    whole = torch.zeros(6)
    captured = capture(program, (whole[:3], whole[3:]))
    report = build(captured, shared=[["left", "right"]])
    (lane,) = [storage for storage in report.storages if storage.backs]
    assert [back.target for back in lane.backs] == ["left", "right"]
    assert report.backs == sum(back.kind.name.endswith("MUTATION") for back in captured.signature.output_specs)
    html = captured.report(tmp_path / "report.html").read_text()
    assert len(re.findall('class="row back"', html)) == 2


def test_every_write_back_is_drawn(real: dict[str, Report]) -> None:
    for report in real.values():
        written = next(amount for amount in report.amounts if amount.label == "written back")
        assert report.backs == written.tensors > 0
        lanes = [storage.name for storage in report.storages if storage.kind != "intermediate"]
        assert len(lanes) == len(set(lanes))


def test_sizes_that_may_differ_have_the_caller_s_names_and_their_bounds() -> None:
    rows = torch.export.Dim("rows", min=3, max=64)
    report = build(capture(edit_rows, (torch.ones(4, 6),), dynamic_shapes={"table": {0: rows}}))
    (table,) = [storage for storage in report.storages if storage.backs]
    assert table.look == "f32[rows,6]" and table.bytes == 96
    assert [view.region for view in table.views] == ["f32[rows,6]", "f32[rows - 1,6] at 6"]
    assert report.mutations[0].region == "f32[rows - 1,6] at 6"
    assert "f32[rows,6]" in [node.look for node in report.nodes if node.role == "op"]
    assert report.sizes == ("rows: 3 to 64 (dimension 0 of `table`)",)
    assert "sizes of the example inputs" in report.subtitle
    html = page(report)
    checked(html)
    assert "<code>rows: 3 to 64</code>" in html and not re.search(r"\bs\d+\b[^}]*,6\]", html)


def test_sizes_of_one_name_are_one_and_a_size_without_a_name_has_torch_s() -> None:
    spec = {"x": {0: "batch"}, "y": {0: "batch", 1: torch.export.Dim.AUTO}}
    program = capture(lambda x, y: x.add_(y.sum(1)), (torch.ones(4), torch.ones(4, 3)), dynamic_shapes=spec)
    batch, columns = program.sizes
    assert str(batch) == "batch: 2 or more (dimension 0 of `x`, dimension 0 of `y`)" and len(batch.symbols) == 2
    assert (columns.low, columns.high, columns.places) == (2, None, ("dimension 1 of `y`",))
    assert {storage.look for storage in build(program).storages} == {"f32[batch]"}
    assert str(program.guards).count("batch") == 1  # that both are equal, the name says


def test_the_backward_that_a_capture_adds_is_not_the_program_s() -> None:
    """What a program does by itself is: its own `backward()` is a part of it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        forward = build(capture(model, (torch.ones(3, 4),)))
    report = build(capture(model, (torch.ones(3, 4),)))
    assert (report.views, len(report.storages)) == (forward.views, len(forward.storages)) == (2, 2)
    assert not any("tangent" in storage.name for storage in report.storages)
    assert not any("capture(model" in line.text for line in report.lines.values())
    whole = build(capture(step, (torch.ones(3, 4),)))
    assert whole.views > report.views and "loss.backward()" in {line.text.strip() for line in whole.lines.values()}


class Writes(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        rows[0].add_(1)
        rows[1:3].mul_(2)
        return rows


class WritesAndReads(nn.Module):
    """One module writes, another line reads."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = Writes()

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.writes(x.view(4, 3))
        between = torch.ones(())
        return rows.sum() + between


def test_a_scatter_stands_at_the_line_and_in_the_module_that_wrote() -> None:
    report = build(capture(WritesAndReads(), (torch.zeros(12),)))
    made = {node.name: node for node in report.nodes if node.role == "op"}
    wrote = {
        name: text(report, report.chains[node.chain or 0][-1]) for name, node in made.items() if node.chain is not None
    }
    assert wrote["select_scatter"] == "rows[0].add_(1)" and wrote["slice_scatter"] == "rows[1:3].mul_(2)"
    assert wrote["sum_1"] == "return rows.sum() + between"
    modules = {name: [step[0] for step in node.path] for name, node in made.items()}
    assert modules["select_scatter"] == modules["slice_scatter"] == ["WritesAndReads", "writes"]
    assert modules["sum_1"] == ["WritesAndReads"]


def test_one_is_no_plural() -> None:
    html = page(build(capture(lambda x: x[0].add_(1), (torch.zeros(3),))))
    labels = re.findall(r"<strong>(\d+)</strong><span>(.*?)</span><small>(.*?)</small>", html)
    assert ("1", "storage", "viewed or written") in labels and ("1", "write-back", "to 1 tensor") in labels
    assert "1 function</small>" in html


def edit_rows(table: Tensor) -> None:
    table[1:].mul_(2)


def test_places_in_words() -> None:
    assert place_of(torch.float32, (2, 3), (3, 1), 0) == "f32[2,3]"
    assert place_of(torch.bfloat16, (2, 3), (1, 2), 5) == "bf16[2,3] strides 1,2 at 5"
    assert place_of(torch.int64, ()) == "i64[]" and place_of(torch.bool, (1,)) == "bool[1]"


def text(report: Report, line: int | None) -> str:
    assert line is not None
    return report.lines[line].text.strip()


# Folds and lanes


def leaves(fold: Fold) -> Iterator[Node]:
    for part in fold.parts:
        yield from leaves(part) if isinstance(part, Fold) else [part]


def test_folding_keeps_all_nodes_in_order(real: dict[str, Report]) -> None:
    for report in (*real.values(), deep(3)):
        assert tuple(leaves(folded(report.nodes))) == report.nodes


def test_nodes_fold_by_module() -> None:
    (root,) = [part for part in folded(deep(2).nodes).parts if isinstance(part, Fold) and part.title == "Deep"]
    assert [(part.title, part.kind) for part in root.parts if isinstance(part, Fold)] == [
        ("blocks.0", "Block"),
        ("blocks.1", "Block"),
    ]


def test_each_storage_is_in_one_picture_of_readable_size(real: dict[str, Report]) -> None:
    for report in (*real.values(), deep(40)):
        clusters = [cluster for group in clustered(report.storages).values() for cluster in group]
        numbers = [storage.number for cluster in clusters for storage in cluster.storages]
        assert sorted(numbers) == list(range(len(report.storages)))
        assert all(len(c.storages) <= LANES and (c.rows <= ROWS or len(c.storages) == 1) for c in clusters)
        assert len({cluster.title for cluster in clustered(report.storages)["written back"]}) == len(
            clustered(report.storages)["written back"]
        )


def test_intermediates_are_folded_at_first(real: dict[str, Report]) -> None:
    for report in real.values():
        groups = clustered(report.storages)
        assert not any(cluster.open for name in ("read", "viewed inside") for cluster in groups[name])
        assert any(cluster.open for cluster in groups["written back"])


def test_rows_are_in_order_of_time(real: dict[str, Report]) -> None:
    for picture in pictures(real):
        times = [row.event.time for row in picture.rows if isinstance(row.event, (View, Write)) and row.what != "begin"]
        assert times == sorted(times)
        kinds = [row.what for row in picture.rows]
        assert "back" not in kinds or set(kinds[kinds.index("back") :]) == {"back"}


def test_no_two_marks_or_lines_share_a_place(real: dict[str, Report]) -> None:
    """Lanes and branches are columns from their first to their last row; no other storage's mark lies on one."""
    for picture in pictures(real):
        spans: dict[int, list[tuple[int, int, int]]] = {}
        for stroke in picture.strokes:
            if stroke.what != "merge":
                found = re.search(r"(\d+) (\d+)V(\d+)$", stroke.path)
                assert found is not None
                x, first, last = map(int, found.groups())
                spans.setdefault(x, []).append((first, last, stroke.storage.number))
        for lanes in spans.values():
            lanes.sort()
            assert all(one[1] <= other[0] for one, other in pairwise(lanes))
        for row in picture.rows:
            for first, last, number in spans.get(row.x, []):
                assert number == row.storage.number or not first < row.y < last
        assert all(row.x < picture.width for row in picture.rows)


def pictures(reports: dict[str, Report]) -> list[Picture]:
    extra = Storage(0, "x", "input", "", 0, (), branching(), (Write(2, "w", "", 9, None),), ())
    groups = [clustered(report.storages) for report in reports.values()]
    return [drawn(c.storages) for group in groups for clusters in group.values() for c in clusters] + [drawn([extra])]


def branching() -> tuple[View, ...]:
    """Views of views, used again after others were made."""
    parents = (None, 0, 1, 0, 2, 3)
    return tuple(View(number, parent, "v", "", number + 1, None) for number, parent in enumerate(parents))


# The page


class Checker(HTMLParser):
    """Collects tags and addresses, and complains about what is not closed as it was opened."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.scripts: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice in {self.get_starttag_text()}"
        self.note(tag, dict(attrs))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.note(tag, dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack[-1] == tag, f"</{tag}> closes {self.stack[-3:]} at {self.getpos()}"
        self.stack.pop()

    def note(self, tag: str, attrs: dict[str, str | None]) -> None:
        self.addresses += [str(attrs[name]) for name in ("href", "src", "action", "data", "srcset") if name in attrs]
        self.ids += [str(attrs["id"])] if "id" in attrs else []
        if tag == "script":
            self.scripts.append(attrs)


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert not checker.stack
    return checker


def test_the_page_is_well_formed_and_needs_nothing_else(real: dict[str, Report], edited: Report) -> None:
    for report in (*real.values(), edited):
        html = page(report)
        found = checked(html)
        assert len(found.ids) == len(set(found.ids))
        assert all(address == "data:," or address[1:] in found.ids for address in found.addresses)
        ours = "".join(re.findall(r"<style>.*?</style>|<script>.*?</script>", html, re.DOTALL))
        assert len(ours) > 10_000
        assert not re.search(r"url\(|@import|https?://|\bfetch\(|XMLHttpRequest|\bimport\(", ours)


def test_the_page_shows_each_node_and_each_storage(edited: Report) -> None:
    html = page(edited)
    found = checked(html)
    assert {f"n{node.number}" for node in edited.nodes} <= set(found.ids)
    for storage in edited.storages:
        assert f'data-storage="{storage.number}"' in html


def test_what_the_user_wrote_is_escaped(tmp_path: Path) -> None:
    file = tmp_path / f"a{HOSTILE.replace('/', '')}.py"
    file.write_text(f"def program(x):\n    x.add_(1)  # {HOSTILE} '\"&\n    return x\n")
    spec = importlib.util.spec_from_file_location("hostile", file)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target = capture(module.program, (torch.zeros(2),)).report(tmp_path / "report.html", title=HOSTILE)
    html = target.read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html and "a&lt;script&gt;alert(1)&lt;script&gt;.py" in html
    assert "<script>alert" not in html
    assert len(checked(html).scripts) == 2  # the chains and our own


def test_a_program_without_writes_has_a_page_too() -> None:
    report = build(capture(lambda x: x + 1, (torch.zeros(2),)))
    html = page(report)
    checked(html)
    assert "views no storage and writes to none" in html and "No data of an input or of state is written" in html


def test_new_metadata_of_an_input_is_told(tmp_path: Path) -> None:
    html = capture(lambda x: x.t_(), (torch.zeros(2, 3),)).report(tmp_path / "report.html").read_text()
    checked(html)
    assert re.search(r"<code>x</code> gets other sizes.*>as_strided_</code>", html)


def test_a_program_of_torch_s_modules_alone_links_to_their_lines() -> None:
    report = build(capture(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), (torch.ones(3, 2),)))
    checked(page(report))
    assert report.title == "Sequential"
    assert all(node.chain is not None for node in report.nodes if node.role == "op" and node.path[0][0] != "elsewhere")


@pytest.mark.slow
def test_five_thousand_ops_stay_readable() -> None:
    with torch.no_grad():
        program = capture(Deep(340).eval(), (torch.ones(1, 4),))
    report = build(program)
    assert report.ops > 5000
    assert len(page(report)) < 12e6
    visible = sum(cluster.rows for group in clustered(report.storages).values() for cluster in group if cluster.open)
    assert 0 < visible < 200


# In a browser

CHROMIUM = installed()
browser_only = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on PATH: `apt-get install chromium` to run this"
)


@pytest.fixture
def browser(tmp_path: Path, real: dict[str, Report]) -> Iterator[Browser]:
    assert CHROMIUM is not None
    file = tmp_path / "report.html"
    file.write_text(page(real["kv-cache-decode"]))
    with Browser(CHROMIUM) as window:
        window.open(file)
        yield window
        assert window.problems == []
        assert [url for url in window.requests if not url.startswith(("file://", "data:"))] == []


@browser_only
def test_search_finds_opens_and_forgets(browser: Browser) -> None:
    assert browser.run("document.querySelectorAll('details[open] .row').length") > 0
    opened = browser.run("document.querySelectorAll('details[open]').length")
    browser.click("#search")
    browser.type("v_proj")
    browser.until("document.querySelector('#hits').textContent.startsWith('1 of ')")
    count = int(browser.run("document.querySelector('#hits').textContent").split()[-1])
    assert count == browser.run("document.querySelectorAll('.hit').length") > 2
    assert browser.run("document.querySelector('.hit.current').checkVisibility()")
    browser.press("Enter", 13)
    assert browser.run("document.querySelector('#hits').textContent") == f"2 of {count}"
    assert browser.run("document.querySelector('.hit.current').checkVisibility()")
    browser.press("Escape", 27)
    assert browser.run("document.querySelectorAll('.hit').length") == 0
    assert browser.run("document.querySelectorAll('details[open]').length") == opened


@browser_only
def test_search_says_when_nothing_is_found(browser: Browser) -> None:
    browser.click("#search")
    browser.type("no such thing")
    assert browser.until("document.querySelector('#hits').textContent") == "nothing"


@browser_only
def test_folds_open_and_close(browser: Browser) -> None:
    inside = "document.querySelectorAll('#storages details[open]').length"
    folds = browser.run("document.querySelectorAll('#storages details').length")
    browser.click("[data-fold=storages][data-open='1']")
    assert browser.run(inside) == folds > 2
    browser.click("[data-fold=storages][data-open='']")
    assert browser.run(inside) == 0
    browser.click("#storages .group > summary")
    assert browser.run(inside) == 1


@browser_only
def test_a_write_leads_to_its_line_and_its_nodes(browser: Browser) -> None:
    browser.click(".row.write .src")
    assert browser.run("document.querySelector('.line.on code').textContent").strip().startswith("self.")
    assert browser.run("document.querySelectorAll('.node.on').length") > 0
    assert browser.run("document.querySelector('.node.on').checkVisibility()")
    assert browser.run("document.querySelector('#which').textContent").startswith("node 1 of ")
    browser.click("#after-node")
    assert browser.run("document.querySelector('#which').textContent").startswith("node 2 of ")
    browser.click("#close")
    assert browser.run("document.querySelectorAll('.on').length") == 0


@browser_only
def test_a_node_leads_to_its_line(browser: Browser) -> None:
    browser.click(".node.back.op code")
    assert browser.run("document.querySelectorAll('.line.on').length") == 1
    line = browser.run("document.querySelector('.line.on').dataset.line")
    chain = (
        "JSON.parse(document.querySelector('#chains').textContent)[document.querySelector('.node.on').dataset.chain]"
    )
    assert browser.run(f"{chain}.at(-1)") == int(line)


@browser_only
def test_columns_are_as_wide_as_their_texts_where_there_is_room(browser: Browser) -> None:
    cells = "[...document.querySelectorAll('.row > *, .mutations td')].filter(e => e.checkVisibility())"
    assert browser.run(f"{cells}.length") > 100
    assert browser.run(f"{cells}.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)") == []


@browser_only
def test_a_narrow_page_is_not_wider_than_its_window(browser: Browser) -> None:
    size = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.until("innerWidth === 420")
    assert browser.run("document.documentElement.scrollWidth") == 420
    row = "document.querySelector('.row.write')"
    assert browser.run(f"{row}.closest('.picture').scrollWidth > 420")  # what does not fit is reached by scrolling
    assert browser.run(f"[...{row}.children].every(e => e.scrollWidth <= e.clientWidth + 1)")


@browser_only
def test_no_text_overlaps_and_the_page_is_not_wider_than_the_window(browser: Browser) -> None:
    browser.click("[data-fold=storages][data-open='1']")
    assert browser.run("document.documentElement.scrollWidth") <= 1400
    overlaps = """[...document.querySelectorAll('.row')].filter(row => {
        const boxes = [...row.children].map(e => e.getBoundingClientRect()).filter(r => r.width);
        boxes.sort((a, b) => a.x - b.x);
        const marks = row.closest('.picture').querySelector('svg').getBoundingClientRect();
        return boxes.some((box, i) => i && box.x < boxes[i - 1].right - 1) ||
               [...row.children].some(e => !e.matches('.t') && e.getBoundingClientRect().x < marks.right);
    }).length"""
    assert browser.run(overlaps) == 0


# The example


@pytest.mark.slow
def test_the_example_writes_both_pages(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "examples" / "report.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("decode", "training"):
        checked((tmp_path / f"{name}.html").read_text())
