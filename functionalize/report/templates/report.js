"use strict";
(() => {
  const one = (selector, from = document) => from.querySelector(selector);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const chains = JSON.parse(one("#chains").textContent);

  // Folding

  const reveal = (element) => {
    for (let at = element.parentElement; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  };
  for (const button of all("[data-fold]")) {
    button.addEventListener("click", () => {
      for (const fold of all("details", one("#" + button.dataset.fold))) fold.open = Boolean(button.dataset.open);
    });
  }

  // Scrolls a pane alone where the element is in one: the page stays where the reader is.
  const show = (element, whole) => {
    reveal(element);
    const pane = element.closest(".body, .scroll");
    if (pane) {
      const from = pane.getBoundingClientRect(), to = element.getBoundingClientRect();
      pane.scrollTop += to.top - from.top - from.height / 3;
      const visible = from.top >= 60 && from.bottom <= innerHeight;
      if (whole && !visible) (pane.closest(".panes") || pane).scrollIntoView({ block: "start" });
    } else if (whole) {
      element.scrollIntoView({ block: "center" });
    }
  };

  // Lines and nodes, linked both ways

  let nodesOf = null; // for each line the nodes that it led to, those that it dispatched itself first
  const nodesByLine = () => {
    if (nodesOf) return nodesOf;
    const own = new Map(), through = new Map();
    const add = (map, line, node) => map.has(line) ? map.get(line).push(node) : map.set(line, [node]);
    for (const node of all(".node[data-chain]")) {
      const chain = chains[Number(node.dataset.chain)];
      chain.forEach((line, index) => add(index === chain.length - 1 ? own : through, line, node));
    }
    nodesOf = { own, through };
    return nodesOf;
  };

  let shown = [], at = 0;
  const clear = () => {
    for (const element of all(".on, .through-on")) element.classList.remove("on", "through-on");
    one("#found").hidden = true;
    shown = [];
  };
  const step = (to) => {
    if (!shown.length) return;
    at = (to + shown.length) % shown.length;
    show(shown[at], false);
    one("#which").textContent = `node ${at + 1} of ${shown.length}`;
  };
  const tell = (text) => {
    one("#where").textContent = text;
    one("#found").hidden = false;
    one("#before-node").disabled = one("#after-node").disabled = shown.length < 2;
    if (!shown.length) one("#which").textContent = "no node of its own is left in the graph";
  };
  const focusLine = (number, from, node = null) => {
    clear();
    const line = one("#L" + number), { own, through } = nodesByLine();
    const direct = own.get(number) || [];
    shown = direct.length ? direct : through.get(number) || [];
    for (const element of shown) element.classList.add(direct.length ? "on" : "through-on");
    for (const element of all(`.row[data-line="${number}"], tr[data-line="${number}"]`)) element.classList.add("on");
    if (line) {
      line.classList.add("on");
      if (from !== line) show(line, true);
    }
    const position = node ? shown.indexOf(node) : 0;
    if (position >= 0 && !node) step(position);
    else if (position >= 0) { at = position; one("#which").textContent = `node ${at + 1} of ${shown.length}`; }
    tell(line ? `${line.closest("details").querySelector(".kind").textContent}:${line.querySelector(".no").textContent}` : "");
  };
  const focusNode = (node, from) => {
    if (node.dataset.chain !== undefined) {
      const chain = chains[Number(node.dataset.chain)];
      focusLine(chain[chain.length - 1], from, node);
    } else {
      clear();
      node.classList.add("on");
    }
    if (from !== node) show(node, true);
  };
  document.addEventListener("click", (event) => {
    if (event.target.closest("summary, button, input") || String(getSelection())) return;
    const found = event.target.closest("[data-node], [data-line]");
    if (!found) return;
    event.preventDefault();
    const element = event.target.closest(".node, .line") || found;
    if (found.dataset.line !== undefined) focusLine(Number(found.dataset.line), element, element.matches(".node") ? element : null);
    else focusNode(one("#n" + found.dataset.node), element);
  });
  one("#before-node").addEventListener("click", () => step(at - 1));
  one("#after-node").addEventListener("click", () => step(at + 1));
  one("#close").addEventListener("click", clear);

  // The rows of one storage, under the pointer

  let near = null;
  one("#storages").addEventListener("mouseover", (event) => {
    const row = event.target.closest(".row");
    const number = row ? row.dataset.storage : null;
    if (number === near) return;
    near = number;
    for (const element of all(".near")) element.classList.remove("near");
    if (row) for (const other of all(`.row[data-storage="${number}"]`, row.parentElement)) other.classList.add("near");
  });

  // Search

  const input = one("#search"), told = one("#hits");
  const texts = all("[data-hit]").map((element) => [element, null]);
  const before = new Map(); // which folds were open before the search
  let hits = [], current = -1, timer = 0;
  const forget = () => {
    for (const element of all(".hit")) element.classList.remove("hit", "current");
    document.body.classList.remove("searching");
    for (const [fold, open] of before) fold.open = open;
    before.clear();
    told.textContent = "";
    hits = [];
    current = -1;
  };
  const go = (to) => {
    if (!hits.length) return;
    if (current >= 0) hits[current].classList.remove("current");
    current = (to + hits.length) % hits.length;
    const element = hits[current];
    element.classList.add("current");
    for (let at = element.parentElement; at; at = at.parentElement) {
      if (at.tagName === "DETAILS" && !at.open) { if (!before.has(at)) before.set(at, false); at.open = true; }
    }
    show(element, true);
    told.textContent = `${current + 1} of ${hits.length}`;
  };
  const textOf = (element) => {
    const titles = all(".op[title], .who[title]", element).map((part) => part.title);
    return [element.textContent, ...titles].join(" ").toLowerCase();
  };
  const search = () => {
    forget();
    const wanted = input.value.trim().toLowerCase();
    for (const button of [one("#previous"), one("#next")]) button.disabled = !wanted;
    if (!wanted) return;
    for (const entry of texts) {
      if (entry[1] === null) entry[1] = textOf(entry[0]);
      if (entry[1].includes(wanted)) { entry[0].classList.add("hit"); hits.push(entry[0]); }
    }
    document.body.classList.add("searching");
    if (hits.length) go(0);
    else told.textContent = "nothing";
  };
  input.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(search, 120); });
  one(".search").addEventListener("submit", (event) => event.preventDefault());
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") { event.preventDefault(); go(current + (event.shiftKey ? -1 : 1)); }
  });
  one("#previous").addEventListener("click", () => go(current - 1));
  one("#next").addEventListener("click", () => go(current + 1));
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== input) { event.preventDefault(); input.focus(); }
    if (event.key === "Escape") { input.value = ""; search(); clear(); input.blur(); }
  });
})();
