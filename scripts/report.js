// Draft trees of the decode trace: drawn from the page's JSON when their row is pointed at, focused
// or pressed. Text is only ever set as text.
"use strict";
(() => {
  const block = document.getElementById("trees");
  if (!block) return;
  const trees = JSON.parse(block.textContent);
  const rows = [...document.querySelectorAll("button.round")];
  let pinned = null;

  const make = (name, kind, text) => {
    const element = document.createElement(name);
    if (kind) element.className = kind;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  const STATES = [["skipped", "not reached"], ["rejected", "✕ not taken"], ["taken", "✓ accepted"]];

  function probability(value, kind) {
    const cell = make("td", "prob " + kind);
    if (value === null) {
      cell.append(make("span", "none", "–"));
      return cell;
    }
    const bar = make("span", "meter");
    const fill = make("span", "fill");
    fill.style.width = Math.max(value * 100, 0.5) + "%";
    bar.append(fill);
    bar.setAttribute("aria-hidden", "true");
    cell.append(make("span", "value", value.toFixed(3)), bar);
    return cell;
  }

  // Lines that lead to a node: for each level above it, whether a later sibling follows there.
  function guides(levels, node) {
    const text = [];
    for (let level = 1; level <= levels[node]; level++) {
      let next = node + 1;
      while (next < levels.length && levels[next] > level) next++;
      const more = next < levels.length && levels[next] === level;
      const own = level === levels[node];
      text.push(own ? (more ? "├ " : "└ ") : more ? "│ " : "  ");
    }
    return text.join("");
  }

  function draw(panel, tree) {
    const table = make("table");
    const caption = make("caption", "", "Round " + tree.round);
    caption.append(make("span", "facts", tree.text.length - 1 + " draft tokens behind " + tree.context + " committed ones"));
    const head = make("tr");
    for (const [text, title] of [["token", ""], ["p", "target"], ["q", "draft"], ["", "verdict"]]) {
      const cell = make("th", "", text);
      cell.scope = "col";
      if (title) cell.append(make("span", text ? "small" : "unseen", title));
      head.append(cell);
    }
    const body = make("tbody");
    tree.text.forEach((text, node) => {
      const [kind, verdict] = node === 0 ? ["root", "last token"] : STATES[tree.state[node]];
      const row = make("tr", kind);
      const name = make("th", "node");
      name.scope = "row";
      const lines = make("span", "guide", guides(tree.level, node));
      lines.setAttribute("aria-hidden", "true");
      name.append(lines, make("span", "unseen", "level " + tree.level[node] + " "));
      name.append(make("span", node && kind === "taken" ? "t accepted" : "t", text));
      row.append(name);
      if (node === 0) {
        const rest = make("td", "verdict", verdict);
        rest.colSpan = 3;
        row.append(rest);
      } else {
        row.append(probability(tree.p[node], "p"), probability(tree.q[node], "q"));
        const cell = make("td", "verdict", verdict.slice(0, 1) === "n" ? "·" : verdict.slice(0, 1));
        cell.append(make("span", "unseen", verdict.slice(1)));
        cell.title = verdict;
        row.append(cell);
      }
      body.append(row);
    });
    const header = make("thead");
    header.append(head);
    table.append(caption, header, body);
    panel.append(table);
    const end = make("p", "end");
    if (tree.last) {
      end.append("Then the target's own token: ", make("span", "t " + tree.last[0], tree.last[1]));
      end.append(" (" + tree.last[0] + ")");
    } else {
      end.textContent = "The text ended with an accepted token.";
    }
    panel.append(end);
  }

  const panelOf = (row) => document.getElementById(row.getAttribute("aria-controls"));

  // Beside its row where there is room; kept inside the window then.
  function settle(panel, row) {
    panel.style.top = "0px";
    if (getComputedStyle(panel).position !== "absolute") return;
    const below = panel.getBoundingClientRect().bottom - window.innerHeight + 12;
    const above = row.getBoundingClientRect().top - 12;
    if (below > 0) panel.style.top = -Math.max(0, Math.min(below, above)) + "px";
  }

  function open(row) {
    const panel = panelOf(row);
    if (!panel.firstChild) draw(panel, trees[panel.id]);
    for (const other of rows) if (other !== row && other !== pinned) close(other);
    panel.hidden = false;
    row.setAttribute("aria-expanded", "true");
    settle(panel, row);
  }

  function close(row) {
    panelOf(row).hidden = true;
    row.setAttribute("aria-expanded", "false");
  }

  function unpin() {
    if (!pinned) return;
    pinned.parentElement.classList.remove("pinned");
    close(pinned);
    pinned = null;
  }

  function step(row, by) {
    const near = [...row.closest("ol").querySelectorAll("button.round")];
    const next = near[near.indexOf(row) + by];
    if (next) next.focus();
  }

  for (const row of rows) {
    const item = row.parentElement;
    item.addEventListener("mouseenter", () => (pinned && pinned !== row) || open(row));
    item.addEventListener("mouseleave", () => pinned === row || close(row));
    row.addEventListener("focus", () => {
      if (pinned && pinned !== row) unpin();
      open(row);
    });
    row.addEventListener("blur", () => pinned === row || close(row));
    row.addEventListener("click", () => {
      const again = pinned === row;
      unpin();
      if (again) return;
      pinned = row;
      item.classList.add("pinned");
      open(row);
    });
    row.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" || event.key === "ArrowUp") {
        event.preventDefault();
        step(row, event.key === "ArrowDown" ? 1 : -1);
      } else if (event.key === "Escape") {
        unpin();
        close(row);
      }
    });
  }
})();
