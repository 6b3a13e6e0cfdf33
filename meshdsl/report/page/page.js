"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const MOST_PARTS = 8; // parts of one dim that are drawn; of more the first and the last
  const MOST_DEVICES = 16; // devices that are listed one by one

  // --- elements: text goes in as text only ---------------------------------------------------

  const make = (tag, text = "", name = "") => {
    const made = document.createElement(tag);
    made.textContent = text;
    if (name) made.className = name;
    return made;
  };
  const draw = (tag, attributes, text) => {
    const made = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const human = (size) => {
    let unit = 0;
    while (size >= 1023.5 && unit < 5) [size, unit] = [size / 1024, unit + 1];
    const digits = size < 10 ? 2 : size < 100 ? 1 : 0;
    return `${Number(size.toFixed(unit ? digits : 0))} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
  };

  // --- what belongs together -----------------------------------------------------------------

  const items = [...document.querySelectorAll("tr.item")].map((element) => {
    const row = data.rows[Number(element.dataset.row)];
    const kind = element.dataset.kind;
    return { element, row, kind, at: Number(element.dataset.row), entry: row[kind][Number(element.dataset.entry)] };
  });
  const lines = new Map([...document.querySelectorAll("#source li")].map((li) => [Number(li.dataset.line), li]));
  const bodies = [...document.querySelectorAll("tbody[data-row]")];

  const rulesOf = (item) => {
    const found = new Set();
    const of = item.kind === "tensors" ? [item] : items.filter((i) => i.kind === "tensors" && i.entry.tensor === item.entry.tensor);
    for (const { entry } of of) {
      for (const cell of entry.cells) {
        for (const rule of Object.values(cell?.rules ?? {})) if (rule.file === data.file) found.add(rule.line);
      }
    }
    return found;
  };
  for (const item of items) item.rules = rulesOf(item);

  // What is the same in all columns can be hidden; a row of totals differs where it is marked.
  const only = $("only");
  for (const { element, entry } of items) element.classList.toggle("same", entry.same);
  for (const body of bodies) body.classList.toggle("same", data.rows[Number(body.dataset.row)].same);
  for (const total of document.querySelectorAll("tr.total")) total.classList.toggle("same", !total.querySelector(".mark"));
  const visible = () => items.filter((i) => !only.checked || !i.entry.same);
  const stops = () => [...new Set(visible().map((i) => i.at))];

  const light = (marked, ruled) => {
    for (const { element } of items) element.classList.toggle("hot", marked.has(element));
    for (const [line, li] of lines) {
      li.classList.toggle("hot", marked.has(li));
      li.classList.toggle("rule", ruled.has(line) && !marked.has(li));
    }
  };
  const lightItem = (item) => {
    const marked = new Set([item.element]);
    for (const other of items) if (other.entry.tensor === item.entry.tensor && item.entry.named !== false) marked.add(other.element);
    if (item.row.file === data.file) marked.add(lines.get(item.row.line));
    light(marked, item.rules);
  };
  const lightLine = (line, li) => {
    const here = items.filter((i) => (i.row.file === data.file && i.row.line === line) || i.rules.has(line));
    light(new Set([li, ...here.map((i) => i.element)]), new Set(here.flatMap((i) => [...i.rules])));
  };
  const dark = () => (picked ? lightItem(picked) : light(new Set(), new Set()));

  // --- the chosen statement ------------------------------------------------------------------

  let picked = null;
  const slider = $("slider");

  const pick = (item) => {
    if (!item) return;
    picked?.element.classList.remove("picked");
    picked?.element.removeAttribute("aria-current");
    if (picked) picked.element.tabIndex = -1;
    picked = item;
    item.element.classList.add("picked");
    item.element.setAttribute("aria-current", "true");
    item.element.tabIndex = 0;
    slider.value = String(stops().indexOf(item.at));
    bodies.forEach((body, at) => body.classList.toggle("later", at > item.at));
    tell(item);
    lightItem(item);
    show(item);
  };
  const step = (to) => choose(visible().find((i) => i.at === stops()[to]), [showRow, showLine]);
  const tell = (item) => {
    const where = item.row.file === data.file ? `line ${item.row.line}` : `${item.row.file}, line ${item.row.line}`;
    const [at, all] = [stops().indexOf(item.at), stops().length];
    $("step").textContent = `${at + 1} of ${all}${only.checked ? " that differ" : ""}, ${where}: ${item.row.text.trim()}`;
    slider.setAttribute("aria-valuetext", $("step").textContent);
    $("back").disabled = at === 0;
    $("next").disabled = at === all - 1;
    const sums = data.columns.map((_, c) => data.rows.slice(0, item.at + 1).reduce((sum, row) => sum + (row.wire_bytes[c] ?? 0), 0));
    const most = Math.max(1, ...data.columns.map((_, c) => data.rows.reduce((sum, row) => sum + (row.wire_bytes[c] ?? 0), 0)));
    $("sent").replaceChildren(...data.columns.map((column, c) => sentSoFar(column, sums[c], most)));
  };
  const sentSoFar = (column, sum, most) => {
    const whole = make("div");
    const track = make("span", "", "track");
    const bar = make("i");
    bar.style.width = `${(100 * sum) / most}%`;
    track.append(bar);
    whole.setAttribute("role", "listitem");
    whole.append(make("b", column.letter), track, make("span", column.totals ? human(sum) : "not compiled"));
    return whole;
  };

  // --- source and statements follow each other -----------------------------------------------

  // The pane that was scrolled last leads; after a choice neither does, until one is scrolled.
  const [frame, table] = [$("source"), $("table")];
  let leader = table;
  const ABOVE = 1 / 3; // of the source is above the line that is first among the statements

  const sideBySide = () => getComputedStyle(frame).position === "sticky";
  const inFrame = (li) => li.getBoundingClientRect().top - frame.getBoundingClientRect().top + frame.scrollTop;
  const lineOf = (row) => (row.file === data.file ? lines.get(row.line) : undefined);
  const choose = (item, shown) => {
    pick(item);
    if (item) shown.forEach((showIt) => showIt(item));
    leader = null;
  };
  const showRow = (item) => item.element.scrollIntoView({ block: "nearest" });
  // Scroll the source alone, not the page.
  const showLine = (item) => {
    const li = lineOf(item.row);
    if (!li) return;
    const [top, bottom] = [inFrame(li), inFrame(li) + li.offsetHeight];
    if (top < frame.scrollTop) frame.scrollTop = top - 40;
    if (bottom > frame.scrollTop + frame.clientHeight) frame.scrollTop = bottom - frame.clientHeight + 40;
  };
  const places = () => stops().map((at) => ({ body: bodies[at], li: lineOf(data.rows[at]) })).filter(({ li }) => li);
  const edge = () => $("stepper").getBoundingClientRect().bottom + 8;
  const followTable = () => {
    if (leader !== table || !sideBySide()) return;
    const first = places().find(({ body }) => body.getBoundingClientRect().bottom > edge());
    if (first) frame.scrollTop = inFrame(first.li) - frame.clientHeight * ABOVE;
  };
  const followSource = () => {
    if (leader !== frame || !sideBySide()) return;
    const reached = (li) => inFrame(li) <= frame.scrollTop + frame.clientHeight * ABOVE;
    const last = places().filter(({ li }) => reached(li)).at(-1);
    const top = last ? last.body.getBoundingClientRect().top - edge() : -window.scrollY;
    window.scrollBy({ top });
  };
  window.addEventListener("scroll", followTable, { passive: true });
  frame.addEventListener("scroll", followSource, { passive: true });
  const lead = (event) => (leader = frame.contains(event.target) ? frame : table);
  for (const kind of ["wheel", "touchmove", "pointerdown", "keydown"]) document.addEventListener(kind, lead, { capture: true, passive: true });

  // --- pictures ------------------------------------------------------------------------------

  // A version of a tensor in one column: dims, sizes, axes per dim (outer first), partial axes.
  const versions = (item) =>
    item.entry.cells.flatMap((cell, c) => {
      if (!cell) return [];
      const column = data.columns[c];
      const base = { column: column.letter, mesh: column.mesh, dims: cell.dims, shape: cell.shape };
      if (item.kind === "routes") {
        const ends = [["before", cell.steps[0].before], ["after", cell.steps.at(-1).after]];
        return ends.map(([when, p]) => ({ ...base, when, ...p, why: when === "after" ? cell.why : "" }));
      }
      const partial = Object.keys(cell.placement).filter((axis) => cell.placement[axis].startsWith("P"));
      const op = partial.length ? cell.placement[partial[0]].slice(2, -1) || "sum" : null;
      return [{ ...base, when: "", named: cell.named, order: cell.order, partial, op, local_shape: cell.local_shape, why: "" }];
    });

  const show = (item) => {
    const groups = new Map();
    for (const version of versions(item)) {
      const key = JSON.stringify([version.when, version.named, version.mesh, version.local_shape]);
      if (!groups.has(key)) groups.set(key, { ...version, columns: [] });
      groups.get(key).columns.push(version.column);
    }
    const title = make("h3", item.entry.tensor);
    const about = make("p", item.kind === "routes" ? "on its way, before and after" : "", "hint");
    $("pictures").replaceChildren(title, about, ...[...groups.values()].map(figure));
  };

  const figure = (version) => {
    const whole = make("figure");
    const caption = make("figcaption");
    const axes = Object.entries(version.mesh).map(([axis, size]) => `${axis}:${size}`).join(", ") || "one device";
    caption.append(make("b", `${version.columns.join(", ")} `), make("span", `${version.when ? `${version.when}: ` : ""}`), make("code", version.named));
    const shapes = version.dims.map((d, i) => (version.shape[i] === version.local_shape[i] ? `${d} ${version.shape[i]}` : `${d} ${version.shape[i]}→${version.local_shape[i]}`));
    caption.append(make("p", `each device: ${shapes.join(", ") || "one number"}; mesh ${axes}`, "hint"));
    const held = holdings(version);
    whole.append(caption, picture(version, held), words(version, held));
    if (version.why) whole.append(make("p", version.why, "hint"));
    return whole;
  };

  // Of every device: its coordinates, and the part of every dim that it holds.
  const holdings = (version) => {
    const axes = Object.entries(version.mesh);
    const count = axes.reduce((n, [, size]) => n * size, 1);
    const found = [];
    for (let rank = 0; rank < Math.min(count, 4096); rank++) {
      const at = {};
      let rest = rank;
      for (const [axis, size] of [...axes].reverse()) [at[axis], rest] = [rest % size, Math.floor(rest / size)];
      const part = {};
      for (const dim of version.dims) part[dim] = (version.order[dim] ?? []).reduce((n, axis) => n * version.mesh[axis] + at[axis], 0);
      found.push({ rank, at, part });
    }
    return found;
  };
  const partsOf = (version, dim) => (version.order[dim] ?? []).reduce((n, axis) => n * version.mesh[axis], 1);

  // Up to three dims are drawn: split ones first, in the order of the tensor.
  const drawn = (version) => {
    const split = version.dims.filter((d) => partsOf(version, d) > 1);
    const chosen = new Set([...split, ...[...version.dims].reverse()].filter((d, i, all) => all.indexOf(d) === i).slice(0, 3));
    return version.dims.filter((d) => chosen.has(d));
  };
  const shown = (count) => (count <= MOST_PARTS ? [...Array(count).keys()] : [...Array(MOST_PARTS - 2).keys(), null, count - 1]);

  const picture = (version, held) => {
    const dims = drawn(version);
    const [deep, high, wide] = [dims.length > 2 ? dims[0] : null, dims.length > 1 ? dims.at(-2) : null, dims.at(-1) ?? null];
    const across = (dim) => (dim === null ? [0] : shown(partsOf(version, dim)));
    const [slabs, rows, columns] = [across(deep), across(high), across(wide)];
    const size = { w: Math.max(58, Math.min(120, 200 / columns.length)), h: high ? Math.max(30, Math.min(60, 110 / rows.length)) : 38 };
    if (columns.length === 1) size.w = 150;
    const copies = Math.min(3, copiesOf(version)) - 1;
    const [left, top, thick] = [high ? 24 : 4, 20 + (deep ? 12 : 0), deep ? 12 : 0];
    const slabHeight = rows.length * size.h + thick + 4 * copies + 8;
    const width = left + columns.length * size.w + thick + 4 * copies + 4;
    const height = top + slabs.length * slabHeight + 4;
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
    svg.append(draw("title", {}, alternative(version, held)), hatch());
    labels(svg, version, { high, wide, left, top, height });
    slabs.forEach((s, i) => {
      const y = top + i * slabHeight;
      if (deep) box(svg, left, y, columns.length * size.w, rows.length * size.h, thick);
      rows.forEach((r, j) => columns.forEach((c, k) => {
        const place = { x: left + k * size.w, y: y + j * size.h, w: size.w, h: size.h };
        const part = Object.fromEntries([[deep, s], [high, r], [wide, c]].filter(([dim]) => dim !== null));
        const number = ((s ?? 0) * rows.length + (r ?? 0)) * columns.length + (c ?? 0);
        block(svg, place, part, number, version, held, copies);
      }));
    });
    return svg;
  };

  const copiesOf = (version) =>
    Object.keys(version.mesh).filter((a) => !version.partial.includes(a) && !Object.values(version.order).flat().includes(a)).reduce((n, a) => n * version.mesh[a], 1);

  const hatch = () => {
    const defs = draw("defs", {});
    const pattern = draw("pattern", { id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    pattern.append(draw("path", { d: "M0 0V7" }));
    defs.append(pattern);
    return defs;
  };
  const box = (svg, x, y, w, h, thick) => {
    svg.append(draw("path", { class: "side", d: `M${x} ${y}l${thick} ${-thick}h${w}l${-thick} ${thick}z` }));
    svg.append(draw("path", { class: "side", d: `M${x + w} ${y}l${thick} ${-thick}v${h}l${-thick} ${thick}z` }));
  };
  const labels = (svg, version, { high, wide, left, top, height }) => {
    const name = (dim) => `${dim} ${version.shape[version.dims.indexOf(dim)]}`;
    if (wide) svg.append(draw("text", { class: "dim", x: left, y: 12 }, name(wide)));
    if (high) svg.append(draw("text", { class: "dim", x: 0, y: 0, transform: `translate(13 ${Math.min(height - 4, top + 90)}) rotate(-90)` }, name(high)));
  };

  const block = (svg, { x, y, w, h }, part, number, version, held, copies) => {
    const skipped = Object.values(part).includes(null);
    const holders = held.filter((d) => Object.entries(part).every(([dim, p]) => d.part[dim] === p));
    for (let i = copies; i > 0 && !skipped; i--) svg.append(draw("rect", { class: "copy", x: x + 4 * i, y: y + 4 * i, width: w - 4, height: h - 4 }));
    const group = draw("g", {});
    const text = skipped ? "…" : label(version, holders);
    group.append(draw("title", {}, skipped ? "parts left out" : `${text}: ${extent(version, holders[0])}`));
    group.append(draw("rect", { class: skipped ? "copy" : `block c${number % 8}`, x: x + 1, y: y + 1, width: w - 4, height: h - 4 }));
    if (version.partial.length && !skipped) group.append(draw("rect", { class: "hatched", x: x + 1, y: y + 1, width: w - 4, height: h - 4 }));
    const short = text.length * 6.6 > w - 10 ? shorter(version, holders) : text;
    const plate = short.length * 6.6 + 6;
    group.append(draw("rect", { class: "plate", x: x + w / 2 - plate / 2 - 1, y: y + h / 2 - 9, width: plate, height: 16, rx: 3 }));
    group.append(draw("text", { x: x + w / 2 - 1, y: y + h / 2 + 3, "text-anchor": "middle" }, short));
    svg.append(group);
  };

  // `0 = 1`: copies on two devices; `0 + 1`: parts whose sum is the value.
  const sign = (version) => ({ sum: "+", prod: "×", max: "max", min: "min" })[version.op ?? "sum"];
  const terms = (version, holders) => {
    const summed = new Map();
    for (const { rank, at } of holders) {
      const key = version.partial.length ? JSON.stringify(Object.entries(at).filter(([axis]) => !version.partial.includes(axis))) : rank;
      summed.set(key, [...(summed.get(key) ?? []), rank]);
    }
    return [...summed.values()];
  };
  const joined = (version, found) => {
    const texts = found.map((ranks) => ranks.join(` ${sign(version)} `));
    return texts.length > 1 && version.partial.length ? texts.map((t) => `(${t})`).join(" = ") : texts.join(" = ");
  };
  const label = (version, holders) => joined(version, terms(version, holders));
  const shorter = (version, holders) => {
    const found = terms(version, holders);
    if (found.length > 1 && found[0].length < 4) return `${joined(version, [found[0]])} = …`;
    return `${found[0][0]} ${found.length > 1 ? "=" : sign(version)} …`;
  };
  const extent = (version, device) =>
    version.dims.map((dim, i) => {
      const from = device.part[dim] * version.local_shape[i];
      return version.local_shape[i] === version.shape[i] ? `${dim} all` : `${dim} ${from}–${from + version.local_shape[i] - 1}`;
    }).join(", ") || "the number";
  const alternative = (version, held) => `${held.length} devices; ${version.named}`;

  const words = (version, held) => {
    const whole = make("div");
    const copies = copiesOf(version);
    const notes = [];
    const dims = drawn(version);
    if (dims.length > 2) notes.push(`one layer for each part of ${dims[0]}`);
    if (copies > 1) notes.push(`${copies} copies of each part (=, stacked)`);
    if (version.partial.length) notes.push(`partial, hatched: the value is the ${version.op} of the parts (${sign(version)})`);
    const left = version.dims.filter((d) => !dims.includes(d));
    if (left.length) notes.push(`not drawn: ${left.map((d) => (partsOf(version, d) > 1 ? `${d} (${partsOf(version, d)} parts)` : `${d} (whole)`)).join(", ")}`);
    if (notes.length) whole.append(make("p", notes.join("; "), "hint"));
    const details = make("details");
    const list = make("ul");
    for (const device of held.slice(0, MOST_DEVICES)) list.append(make("li", `${device.rank}: ${extent(version, device)}${version.partial.length ? ", a part" : ""}`));
    if (held.length > MOST_DEVICES) list.append(make("li", "…"));
    details.append(make("summary", "device by device"), list);
    whole.append(details);
    return whole;
  };

  // --- hands on ------------------------------------------------------------------------------

  const move = (item, by) => {
    const shown = visible();
    const there = shown[Math.max(0, Math.min(shown.length - 1, shown.indexOf(item) + by))];
    choose(there, [showLine]);
    there.element.focus();
  };
  const take = (item) => choose(item, [showLine]);
  const KEYS = { ArrowDown: (i) => move(i, 1), ArrowUp: (i) => move(i, -1), Enter: take, " ": take };
  for (const item of items) {
    const { element } = item;
    element.classList.add("live");
    element.tabIndex = -1;
    element.addEventListener("mouseenter", () => lightItem(item));
    element.addEventListener("mouseleave", dark);
    element.addEventListener("focus", () => lightItem(item));
    element.addEventListener("blur", dark);
    element.addEventListener("click", () => take(item));
    element.addEventListener("keydown", (event) => {
      if (!(event.key in KEYS)) return;
      event.preventDefault();
      KEYS[event.key](item);
    });
  }
  for (const [line, li] of lines) {
    const here = () => visible().find((i) => i.row.file === data.file && i.row.line === line);
    const first = items.find((i) => i.row.file === data.file && i.row.line === line);
    if (!first && !items.some((i) => i.rules.has(line))) continue;
    li.classList.add("live");
    li.addEventListener("mouseenter", () => lightLine(line, li));
    li.addEventListener("mouseleave", dark);
    li.addEventListener("click", () => choose(here(), sideBySide() ? [showRow] : []));
  }
  const narrow = () => {
    document.body.classList.toggle("only", only.checked);
    slider.max = String(Math.max(0, stops().length - 1));
    const shown = visible();
    choose(shown.find((i) => i === picked) ?? shown.find((i) => i.at >= (picked?.at ?? 0)) ?? shown.at(-1), []);
  };
  only.addEventListener("change", narrow);
  $("filter").hidden = items.every((i) => i.entry.same);
  slider.addEventListener("input", () => step(Number(slider.value)));
  $("back").addEventListener("click", () => step(Number(slider.value) - 1));
  $("next").addEventListener("click", () => step(Number(slider.value) + 1));

  const theme = $("theme");
  const isDark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const nameTheme = () => (theme.textContent = isDark() ? "Light" : "Dark");
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
  });
  theme.hidden = false;
  nameTheme();

  if (items.length) {
    $("stepper").hidden = false;
    narrow();
    leader = table;
  }
})();
