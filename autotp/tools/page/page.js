"use strict";
(() => {
  const shown = JSON.parse(document.getElementById("shown").textContent);
  const root = document.documentElement, body = document.body;
  const make = (tag, text, kind) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (kind) node.className = kind;
    return node;
  };
  const time = (s) => (s < 0.1 ? `${(s * 1000).toPrecision(3)} ms` : `${s.toPrecision(3)} s`);
  const product = (sizes) => sizes.reduce((total, n) => total * n, 1);
  const bytes = (n) => {
    for (const unit of ["B", "KB", "MB", "GB"]) {
      if (n < 1000) return unit === "B" ? `${n} B` : `${n.toFixed(1)} ${unit}`;
      n /= 1000;
    }
    return `${n.toFixed(1)} TB`;
  };

  // Axes: pointing at one lights all that has it; a click keeps it lit.
  let kept = null;
  const touched = [...document.querySelectorAll("[data-axes]")].map((node) => [node, node.dataset.axes.split(" ")]);
  function light(axis) {
    body.classList.toggle("lit", axis !== null);
    const one = axis === null ? null : document.querySelector(`[data-axis="${axis}"]`);
    root.style.setProperty("--lit", one ? getComputedStyle(one).getPropertyValue("--a") : "");
    for (const [node, axes] of touched) node.classList.toggle("on", axis !== null && axes.includes(axis));
  }
  function keep(axis) {
    kept = kept === axis ? null : axis;
    for (const node of document.querySelectorAll(".legend [data-axis]")) {
      node.setAttribute("aria-pressed", String(node.dataset.axis === kept));
    }
    light(kept);
  }
  const axisOf = (event) => (event.target.closest ? event.target.closest("[data-axis]") : null);
  document.addEventListener("mouseover", (event) => {
    const at = axisOf(event);
    light(at ? at.dataset.axis : kept);
  });
  document.addEventListener("focusin", (event) => axisOf(event) && light(axisOf(event).dataset.axis));
  document.addEventListener("focusout", () => light(kept));
  document.addEventListener("click", (event) => axisOf(event) && keep(axisOf(event).dataset.axis));
  document.addEventListener("keydown", (event) => event.key === "Escape" && keep(kept));

  // Theme, folded lines, copying.
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    draw();
  });
  for (const table of document.querySelectorAll(".code tbody")) fold([...table.rows]);
  function fold(rows) {
    for (let i = 0; i < rows.length; ) {
      let j = i;
      while (j < rows.length && rows[j].classList.contains("quiet")) j++;
      const blank = (row) => !row.cells[1].textContent.trim();
      const from = i === 0 ? 1 : i, to = j === rows.length || blank(rows[j - 1]) ? j : j - 1;
      if (to - from >= 2) {
        for (const row of rows.slice(from, to)) row.classList.add("fold");
        const gap = make("tr", undefined, "gap");
        gap.append(make("td"), make("td", `⋯ ${to - from} lines`), make("td"));
        rows[from].before(gap);
      }
      i = Math.max(j, i + 1);
    }
  }
  document.getElementById("all").addEventListener("change", (event) => body.classList.toggle("all", event.target.checked));
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      const text = document.getElementById(button.dataset.copy).textContent;
      try {
        await navigator.clipboard.writeText(text);
      } catch {  // A file that was opened without a server may not write to the clipboard.
        const field = make("textarea", text);
        body.append(field);
        field.select();
        document.execCommand("copy");
        field.remove();
      }
      button.textContent = "copied";
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
  }

  // Ranks.
  const { tp, cp, dp, pp, stages, parameters, limit, node: inNode, zero } = shown.ranks;
  const wide = tp * cp;  // The ranks of one replica and stage: cp neighbourhoods of tp ranks.
  const REPLICAS = 64, kinds = shown.kinds;
  const grids = document.getElementById("grids"), panel = document.getElementById("rank");
  const cellsOf = [];
  let selected = [0, 0, 0];
  const drawn = Math.min(dp, REPLICAS), most = Math.max(...stages.map((s) => s.total || 1));
  grids.classList.toggle("big", drawn * wide * pp <= 64 && wide * pp > 1);
  for (let r = 0; r < drawn; r++) {
    const grid = make("div", undefined, "g");
    grid.style.gridTemplateColumns = `repeat(${wide}, max-content)`;
    if (dp > 1 && wide * pp > 1) grid.append(make("u", `replica ${r}`));
    for (let p = 0; p < pp; p++) {
      for (let t = 0; t < wide; t++) {
        const cell = make("b");
        cell.dataset.at = `${p} ${r} ${t}`;
        cell.title = `rank ${(p * dp + r) * wide + t}`;
        cell.style.opacity = String(0.25 + 0.75 * ((stages[p].total || 1) / most) * share(t % tp));
        cellsOf.push([cell, p, r, t]);
        grid.append(cell);
      }
    }
    grids.append(grid);
  }
  if (dp > drawn) grids.append(make("u", `and ${dp - drawn} replicas that hold the same`));
  function share(t) {
    const held = (row) => row.elements[Math.min(t, row.elements.length - 1)];
    const sum = (get) => parameters.reduce((total, row) => total + get(row), 0);
    return sum(held) / Math.max(1, sum((row) => row.elements[0]));
  }
  grids.addEventListener("click", (event) => {
    if (event.target.dataset.at) select(event.target.dataset.at.split(" ").map(Number));
  });
  grids.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const across = Math.min(drawn * wide - 1, Math.max(0, selected[1] * wide + selected[2] + step[1]));
    select([Math.min(pp - 1, Math.max(0, selected[0] + step[0])), Math.floor(across / wide), across % wide]);
  });
  function select([p, r, t]) {
    selected = [p, r, t];
    for (const [cell, a, b, c] of cellsOf) {
      const same = [a === p, b === r, c === t];
      cell.classList.toggle("me", same.every(Boolean));
      cell.classList.toggle("tp", same[0] && same[1] && !same[2] && Math.floor(c / tp) === Math.floor(t / tp));
      cell.classList.toggle("dp", same[0] && !same[1] && same[2]);
      cell.classList.toggle("pp", !same[0] && same[1] && same[2]);
    }
    const rank = (p * dp + r) * wide + t, stage = stages[p];
    const where = inNode ? `, device ${rank % inNode} of node ${Math.floor(rank / inNode)}` : "";
    const part = cp > 1 ? `, part ${Math.floor(t / tp)} of ${cp} of a sequence` : "";
    panel.replaceChildren(make("h3", `rank ${rank}: tensor ${t % tp} of ${tp}${part}, replica ${r} of ${dp}, pipeline ${p} of ${pp}${where}`));
    const peers = make("p", undefined, "peer");
    for (const [name, count, colour] of [["tensor", tp, "--c0"], ["context", cp, "--c1"], ["data", dp, "--i"], ["pipeline", pp, "--u"]]) {
      if (count < 2) continue;
      const dot = make("i");
      dot.style.background = `var(${colour})`;
      peers.append(dot, `${name}: talks to ${name === "pipeline" ? "its neighbours among " : ""}${count - 1}`);
    }
    const columns = make("div", undefined, "cols");
    if (peers.childNodes.length) panel.append(peers);
    panel.append(columns);
    if (stage.total) columns.append(memoryOf(stage));
    columns.append(parametersOf(stage, t % tp));
  }
  function memoryOf(stage) {
    const part = make("div"), bar = make("div", undefined, "bar"), table = make("table", undefined, "keys");
    for (const [i, kind] of kinds.entries()) {
      const size = stage.memory[kind] || 0, row = table.insertRow(), mark = make("i", undefined, `m${i}`);
      const piece = make("span", undefined, `m${i}`);
      piece.style.width = `${(size / limit) * 100}%`;
      bar.append(piece);
      const name = row.insertCell();
      name.append(mark, kind);
      row.insertCell().textContent = `${(size / 2 ** 30).toFixed(2)} GiB`;
    }
    const row = table.insertRow();
    row.insertCell().append(make("b", "tensors"));
    row.insertCell().append(make("b", `${(stage.total / 2 ** 30).toFixed(2)} GiB`));
    part.append(make("small", `memory at the fullest moment, of the fullest tensor-parallel rank`), bar, table);
    return part;
  }
  function parametersOf(stage, t) {
    const part = make("div"), table = make("table"), head = table.insertRow();
    for (const name of ["parameter", "whole", "here", "share", "bytes"]) head.append(make("th", name));
    let sum = 0;
    for (const row of parameters) {
      const count = row.block ? stage.counts[row.block] || 0 : Number(stage.outside.includes(row.name));
      if (!count) continue;
      const at = Math.min(t, row.shapes.length - 1), size = row.elements[at] * row.itemsize;
      sum += size * count;
      const line = table.insertRow();
      line.insertCell().append(make("span", row.name, "name"));
      line.insertCell().append(make("code", row.whole.join(" × ")));
      line.insertCell().append(make("code", row.shapes[at].join(" × ")));
      line.insertCell().textContent = `${((row.elements[at] / product(row.whole)) * 100).toFixed(row.elements[at] === product(row.whole) ? 0 : 1)} %`;
      line.insertCell().textContent = `${bytes(size)}${count > 1 ? ` × ${count}` : ""}`;
    }
    const total = table.insertRow();
    total.insertCell().append(make("b", zero === 3 ? "all, before ZeRO divides it" : "all"));
    total.append(make("td"), make("td"), make("td"));
    total.insertCell().append(make("b", bytes(sum)));
    const blocks = stage.blocks ? `blocks ${stage.blocks}` : "no blocks";
    part.append(make("small", `${blocks}${zero ? `; ZeRO ${zero} divides ${["", "the optimizer's state", "that and gradients", "parameters, gradients and state"][zero]} among ${dp} replicas` : ""}`), table);
    return part;
  }
  select(selected);

  // Schedule.
  const canvas = document.getElementById("timeline"), plan = shown.timeline;
  for (const row of plan ? plan.rows : []) {
    let at = 0;
    row.actions = row.actions.split(" ").map((word) => {
      const [what, micro, since] = word.split(".");
      at += parseInt(since, 36);
      return [parseInt(what.slice(0, -1), 36), what.slice(-1), parseInt(micro, 36), at];
    });
  }
  let view = "whole", zoom = [0, 1];
  function draw() {
    if (!canvas || !plan) return;
    const style = getComputedStyle(root), colour = (name) => style.getPropertyValue(name).trim();
    const paint = { F: colour("--f"), B: colour("--b"), I: colour("--i"), W: colour("--w") };
    const high = Math.max(14, Math.min(30, 420 / plan.rows.length)), left = 46, ratio = Math.max(2, devicePixelRatio || 1);
    const wide = canvas.clientWidth || 1000, tall = plan.rows.length * (high + 3) + 24;
    canvas.style.height = `${tall}px`;
    canvas.width = wide * ratio;
    canvas.height = tall * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const from = zoom[0] * plan.ticks, scale = (wide - left) / ((zoom[1] - zoom[0]) * plan.ticks);
    const x = (tick) => left + (tick - from) * scale;
    pen.font = "10px system-ui, sans-serif";
    pen.textBaseline = "middle";
    plan.rows.forEach((row, i) => {
      const y = i * (high + 3) + 2;
      for (const [stage, half, micro, start] of row.actions) {
        const length = plan.lengths[`${stage}${half}`] * scale, begin = x(start);
        if (begin + length < left || begin > wide) continue;
        const first = Math.max(begin, left), round = Math.floor(stage / plan.ranks);
        pen.globalAlpha = 1 - 0.32 * (round % 3);
        pen.fillStyle = paint[half];
        pen.fillRect(first, y, Math.max(0.4, begin + length - first - (length > 4 ? 0.8 : 0)), high);
        pen.globalAlpha = 1;
        if (length > 17) {
          pen.fillStyle = "#fff";
          pen.textAlign = "center";
          pen.fillText(String(micro), (first + begin + length) / 2, y + high / 2 + 0.5);
        }
      }
      if (x(plan.ticks) > left && plan.pipeline < plan.ticks) {
        pen.fillStyle = colour("--u");
        pen.fillRect(Math.max(left, x(plan.pipeline)), y, Math.max(1, x(plan.ticks) - Math.max(left, x(plan.pipeline))), high);
      }
      pen.clearRect(0, y - 3, left - 4, high + 6);
      pen.fillStyle = colour("--dim");
      pen.textAlign = "left";
      pen.fillText(`pp ${row.rank}`, 6, y + high / 2);
    });
    pen.fillStyle = colour("--dim");
    for (let i = 0; i <= 6; i++) {
      pen.textAlign = i === 0 ? "left" : i === 6 ? "right" : "center";
      const part = zoom[0] + ((zoom[1] - zoom[0]) * i) / 6;
      pen.fillText(time(part * plan.seconds), left + ((wide - left) * i) / 6, tall - 9);
    }
    for (const button of document.querySelectorAll("[data-zoom]")) {
      button.classList.toggle("now", button.dataset.zoom === view);
    }
  }
  function part(name) {
    const piece = Math.min(0.5, 48 / plan.rows[0].actions.length);
    return { begin: [0, piece], end: [1 - piece, 1] }[name] || [0, 1];
  }
  if (canvas && plan) {
    for (const button of document.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => { view = button.dataset.zoom; zoom = part(view); draw(); });
    }
    canvas.addEventListener("mousemove", (event) => {
      const high = Math.max(14, Math.min(30, 420 / plan.rows.length)), row = plan.rows[Math.floor((event.offsetY - 2) / (high + 3))];
      const tick = (zoom[0] + ((event.offsetX - 46) / (canvas.clientWidth - 46)) * (zoom[1] - zoom[0])) * plan.ticks;
      const seconds = (n) => time((n / plan.ticks) * plan.seconds);
      let text = "\u00a0";
      if (row && event.offsetX > 46) {
        const hit = row.actions.find(([s, h, , start]) => start <= tick && tick < start + plan.lengths[`${s}${h}`]);
        const names = { F: "forward", B: "backward", I: "backward of inputs", W: "backward of weights" };
        const what = hit ? `${names[hit[1]]} of microbatch ${hit[2]}, stage ${hit[0]}, from ${seconds(hit[3])} for ${seconds(plan.lengths[`${hit[0]}${hit[1]}`])}` : tick > plan.pipeline ? `update: ${Object.entries(plan.behind).map(([n, s]) => `${n} ${time(s)}`).join(", ")}` : "idle";
        text = `pipeline rank ${row.rank}, ${seconds(tick)}: ${what}`;
      }
      document.getElementById("when").textContent = text;
    });
    addEventListener("resize", draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    matchMedia("print").addEventListener("change", draw);
    draw();
  }
  body.dataset.ready = "yes";
})();
