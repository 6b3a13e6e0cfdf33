(async () => {
  const $ = (id) => document.getElementById(id);
  const start = JSON.parse($("data").textContent);
  const isAlone = start.engine === "worker"; // a page without a server and without a file
  if (isAlone) Object.assign(start, await linked(start));
  if (new URLSearchParams(location.search).has("compact")) document.documentElement.classList.add("compact"); // in another page
  const PAUSE = 200; // milliseconds without a keystroke before the program is compiled, at most
  const LONG = 1500; // milliseconds after which a question under way gives way to a newer one
  const COLOURED = 60000; // characters up to which words have colours
  const SEARCHED = 10000; // milliseconds of a search after which no further round begins
  const RULES = "rules"; // the choice of a layout or a mesh that is typed
  const text = $("text");

  // --- elements: text goes in as text; markup comes from the server, which escapes all text ----

  const make = (tag, content = "", name = "") => {
    const made = document.createElement(tag);
    made.textContent = content;
    if (name) made.className = name;
    return made;
  };
  const put = (element, markup) => {
    const parsed = new DOMParser().parseFromString(markup, "text/html");
    element.replaceChildren(...parsed.body.childNodes);
  };
  // What stands between backquotes is code.
  const worded = (words) => words.split("`").map((part, i) => (i % 2 ? make("code", part) : part));
  const button = (content, does) => {
    const made = make("button");
    made.append(...worded(content));
    made.type = "button";
    made.addEventListener("click", does);
    return made;
  };

  // --- what answers ----------------------------------------------------------------------------

  const ask = isAlone ? inWorker((words) => ($("verdict").textContent = words)) : overHTTP();

  // --- the editor ------------------------------------------------------------------------------

  let runs = []; // [length, class] of the text that was coloured last
  let coloured = "";
  let marks = []; // { start, end, severity } in the text that was checked last
  let checked = "";

  // The text changed in one place: what is before and behind it keeps its colours and marks.
  const change = (before, after) => {
    const most = Math.min(before.length, after.length);
    let head = 0;
    while (head < most && before[head] === after[head]) head += 1;
    let tail = 0;
    while (tail < most - head && before[before.length - 1 - tail] === after[after.length - 1 - tail]) tail += 1;
    return { head, tail };
  };
  const cut = (from, to) => {
    const found = [];
    let at = 0;
    for (const [length, name] of runs) {
      const first = Math.max(at, from);
      const last = Math.min(at + length, to);
      if (last > first) found.push([last - first, name]);
      at += length;
    }
    return found;
  };
  const recolour = () => {
    const { head, tail } = change(coloured, text.value);
    const middle = text.value.length - head - tail;
    runs = [...cut(0, head), ...(middle ? [[middle, ""]] : []), ...cut(coloured.length - tail, coloured.length)];
    coloured = text.value;
  };
  const remark = () => {
    const { head, tail } = change(checked, text.value);
    const moved = text.value.length - checked.length;
    const kept = marks.filter((m) => m.end <= head || m.start >= checked.length - tail);
    marks = kept.map((m) => (m.end <= head ? m : { ...m, start: m.start + moved, end: m.end + moved }));
    checked = text.value;
  };
  const pieces = () => {
    const edges = new Set(marks.flatMap((m) => [m.start, m.end]));
    const found = [];
    let at = 0;
    for (const [length, name] of runs) {
      const end = at + length;
      const inner = [...edges].filter((edge) => edge > at && edge < end).sort((a, b) => a - b);
      for (const edge of [...inner, end]) {
        const mark = marks.find((m) => m.start <= at && m.end >= edge);
        found.push({ words: text.value.slice(at, edge), name, mark });
        at = edge;
      }
    }
    return found;
  };
  const draw = () => {
    const shown = document.createDocumentFragment();
    for (const { words, name, mark } of pieces()) {
      if (!name && !mark) shown.append(words);
      else shown.append(make("span", words, `${name}${mark ? ` mark ${mark.severity}` : ""}`));
    }
    shown.append("\n"); // a last line without an end has its height all the same
    $("shown").replaceChildren(shown);
    const bad = new Set(marks.filter((m) => m.severity === "error").map((m) => lineAt(m.start)));
    const numbers = document.createDocumentFragment();
    text.value.split("\n").forEach((_, i) => {
      numbers.append(bad.has(i + 1) ? make("span", `${i + 1}`, "bad") : `${i + 1}`, "\n");
    });
    $("numbers").replaceChildren(numbers);
  };
  const lineAt = (offset) => text.value.slice(0, offset).split("\n").length;
  const offsetOf = (line) => text.value.split("\n").slice(0, line - 1).reduce((sum, l) => sum + l.length + 1, 0);

  let colouring = false;
  const colour = async () => {
    if (colouring || text.value.length > COLOURED) return;
    colouring = true;
    const sent = text.value;
    try {
      const { status, body } = await ask("/colours", { text: sent });
      if (status === 200 && sent === text.value) [runs, coloured] = [body.runs, sent];
    } catch { /* the next question says that the server is gone */ }
    colouring = false;
    if (sent !== text.value) return colour();
    draw();
  };

  const jump = (from, to = from) => {
    text.focus({ preventScroll: true });
    text.setSelectionRange(from, to);
    const height = parseFloat(getComputedStyle($("shown")).lineHeight);
    const editor = $("editor");
    editor.scrollTop = Math.max(0, lineAt(from) * height - editor.clientHeight / 2);
    editor.scrollIntoView({ block: "nearest" });
    here();
  };
  const replace = (from, to, words) => {
    text.focus();
    text.setSelectionRange(from, to);
    // Unlike `setRangeText`, this can be undone by the keyboard.
    const done = words ? document.execCommand("insertText", false, words) : document.execCommand("delete");
    if (!done) {
      text.setRangeText(words, from, to, "end");
      edited();
    }
  };
  const apply = (fix) => {
    for (const edit of [...fix.edits].sort((a, b) => b.start - a.start)) replace(edit.start, edit.end, edit.text);
    refresh();
  };

  // --- choices ---------------------------------------------------------------------------------

  const chosen = structuredClone(start.chosen);
  const optionsOf = (select, entries, value) => {
    const known = entries.some(([v]) => v === value);
    const all = known || value === null ? entries : [...entries, [value, `${value.replace(/^\w+:/, "")} (not in the file)`]];
    const there = [...select.options].map((o) => [o.value, o.label]);
    if (JSON.stringify(there) === JSON.stringify(all) && select.value === value) return; // it may be open
    select.replaceChildren(...all.map(([v, label]) => new Option(label, v, false, v === value)));
  };
  const named = (names, kind = "") => names.map((name) => [`${kind}:${name}`, name]);
  const LAYOUT = { first: "first", typed: "typed" };
  const spelled = { layout: LAYOUT.first, mesh: LAYOUT.first };
  if (chosen.sbp !== null) spelled.layout = `sbp:${chosen.sbp}`;
  else if (chosen.layout !== null) spelled.layout = /[:,>]|^$/.test(chosen.layout) ? LAYOUT.typed : `layout:${chosen.layout}`;
  if (chosen.mesh !== null) spelled.mesh = /[:,]/.test(chosen.mesh) ? LAYOUT.typed : `mesh:${chosen.mesh}`;
  $("rules").value = spelled.layout === LAYOUT.typed ? chosen.layout : "";
  $("axes").value = spelled.mesh === LAYOUT.typed ? chosen.mesh : "";

  const offer = (choices) => {
    const { programs, layouts, sbps, meshes, dims } = choices;
    $("program-field").hidden = programs.length < 2;
    optionsOf($("program"), programs.map((p) => [p, p]), chosen.program);
    const first = layouts.length ? `${layouts[0]} (the first)` : "none: all whole";
    const others = named(layouts.slice(1), "layout");
    if (spelled.layout === `layout:${layouts[0]}`) spelled.layout = LAYOUT.first;
    if (spelled.mesh === `mesh:${meshes[0]}`) spelled.mesh = LAYOUT.first;
    const blocks = sbps.map((name) => [`sbp:${name}`, `${name} (sbp)`]);
    optionsOf($("layout"), [[LAYOUT.first, first], ...others, ...blocks, [LAYOUT.typed, "other rules"]], spelled.layout);
    const mesh = meshes.length ? `${meshes[0]} (the first)` : "one device";
    optionsOf($("mesh"), [[LAYOUT.first, mesh], ...named(meshes.slice(1), "mesh"), [LAYOUT.typed, "other axes"]], spelled.mesh);
    const cluster = meshes.length ? "that of the mesh, if it has one" : "none";
    optionsOf($("cluster"), [["", cluster], ...start.clusters.map((c) => [c, c])], chosen.cluster ?? "");
    optionsOf($("reduce"), start.policies.map((p) => [p, p]), chosen.reduce);
    offerSizes(dims);
    showFields();
  };
  // What is chosen, without what the program does not have.
  const keepKnown = ({ programs, dims }) => {
    if (programs.length > 1 && !programs.includes(chosen.program)) chosen.program = programs[0];
    if (programs.length < 2) chosen.program = null;
    for (const name of Object.keys(chosen.sizes)) if (!(name in dims)) delete chosen.sizes[name];
  };
  const offerSizes = (dims) => {
    const there = new Map([...$("dims").querySelectorAll("input")].map((i) => [i.name, i]));
    const names = Object.keys(dims);
    if (names.join() !== [...there.keys()].join()) {
      $("dims").replaceChildren(...names.map((name) => {
        const label = make("label", `${name} `);
        const input = there.get(name) ?? Object.assign(make("input"), { type: "number", name, min: 1, step: 1 });
        input.value = chosen.sizes[name] ?? "";
        label.append(input);
        return label;
      }));
    }
    for (const input of $("dims").querySelectorAll("input")) input.placeholder = dims[input.name];
    const set = Object.keys(chosen.sizes).length;
    $("sizes").querySelector("summary").textContent = set ? `Sizes (${set} set)` : "Sizes";
  };
  const showFields = () => {
    $("rules-field").hidden = spelled.layout !== LAYOUT.typed;
    $("axes-field").hidden = spelled.mesh !== LAYOUT.typed;
  };
  const after = (value, kind) => (value.startsWith(`${kind}:`) ? value.slice(kind.length + 1) : null);
  const tight = (words) => words.replace(/\s*([:,])\s*/g, "$1").trim();
  const question = () => ({
    text: text.value,
    program: chosen.program,
    layout: spelled.layout === LAYOUT.typed ? tight($("rules").value) : after(spelled.layout, "layout"),
    sbp: after(spelled.layout, "sbp"),
    mesh: spelled.mesh === LAYOUT.typed ? tight($("axes").value) || null : after(spelled.mesh, "mesh"),
    cluster: chosen.cluster,
    reduce: chosen.reduce,
    sizes: chosen.sizes,
  });

  // --- questions and answers -------------------------------------------------------------------

  let flight = null; // the question under way
  let took = PAUSE; // milliseconds of the last answer: what is soon answered is soon asked
  const pause = () => Math.min(PAUSE, Math.max(40, took / 4));
  let waiting = 0;
  let answered = "";

  const busy = (yes) => $("outcome").setAttribute("aria-busy", String(yes)); // not of what is typed
  const refresh = (pause = 0) => {
    busy(true);
    if (searching && searching.asked !== JSON.stringify(question())) cutShort("The search has ended: the program has changed.");
    clearTimeout(waiting);
    waiting = setTimeout(compile, pause);
  };
  const compile = async () => {
    remember();
    const asked = JSON.stringify(question());
    if (asked === flight?.asked) return;
    if (asked === answered && !flight) return busy(false);
    const age = flight ? performance.now() - flight.since : LONG;
    if (age < LONG) return refresh(LONG - age);
    const mine = (flight = { asked, since: performance.now() });
    $("verdict").classList.add("busy");
    let reply = null;
    try {
      const asking = ask("/compile", JSON.parse(asked));
      mine.over = asking.catch(() => null);
      reply = await asking;
    } catch {
      reply = { status: 0, body: { error: "the server is gone; `meshdsl play` starts it again" } };
    }
    if (flight !== mine) return;
    flight = null;
    if (answered) took = performance.now() - mine.since; // the first one has loaded the compiler
    if (reply.status === 409) return refresh(PAUSE);
    $("verdict").classList.remove("busy");
    if (JSON.parse(asked).text === text.value) {
      answered = asked;
      show(reply);
    }
    refresh();
  };

  const show = ({ status, body }) => {
    const failed = body.error ?? body.failed;
    if (failed !== undefined) {
      const what = status === 200 ? `meshdsl itself failed: ${failed}` : failed;
      $("verdict").textContent = what;
      $("result").classList.add("stale");
      return;
    }
    keepKnown(body.choices);
    offer(body.choices);
    offerColumns(body.choices);
    const found = body.diagnostics;
    checked = text.value;
    marks = found.filter((d) => d.where?.start !== undefined).map((d) => ({
      start: d.where.start, end: Math.max(d.where.end, d.where.start + 1), severity: d.severity,
    }));
    draw();
    $("problems").replaceChildren(...found.map(problem));
    $("problems").hidden = !found.length;
    const errors = found.filter((d) => d.severity === "error").length;
    $("result").classList.toggle("stale", !body.result);
    if (body.result) tell(body.result);
    $("search").disabled = !shown;
    const count = `${errors} ${errors === 1 ? "error" : "errors"}`;
    const last = shown ? "Below is the outcome of the last program that had none." : "";
    $("verdict").textContent = `${errors ? `${count}. ` : ""}${body.result?.sentence ?? last}`;
  };

  const FIELDS = { "--layout": "rules", "--mesh": "axes", "--sbp": "layout", "--program": "program", "--reduce": "reduce", "--cluster": "cluster", "--set": "sizes" };
  const problem = (found) => {
    const item = make("li", "", found.severity);
    item.append(make("span", `${found.severity} ${found.code}`, "severity"), ": ", ...worded(found.message), " ");
    const where = found.where;
    if (where?.start !== undefined) item.append(button(`line ${where.line}`, () => jump(where.start, where.end)));
    else if (where) item.append(make("span", FIELDS[where.file] ? "(a choice above)" : `(${where.file}, line ${where.line})`));
    for (const other of found.related) {
      const line = make("p");
      line.append(...worded(other.message), " ");
      if (other.where.start !== undefined) line.append(button(`line ${other.where.line}`, () => jump(other.where.start, other.where.end)));
      item.append(line);
    }
    if (found.help) {
      const help = make("p");
      help.append("help: ", ...worded(found.help));
      item.append(help);
    }
    for (const fix of found.fixes) {
      const made = button(fix.title, () => found.of === text.value && apply(fix));
      found.of = text.value;
      item.append(made);
    }
    return item;
  };

  // --- other layouts: jobs that wait for the program under way, one after the other ------------

  let tail = Promise.resolve();
  const inTurn = (path, entries) => {
    const job = async () => {
      while (flight) await flight.over;
      return ask(path, entries);
    };
    tail = tail.then(job).catch(() => ({ status: 0, body: { error: "the server is gone" } }));
    return tail;
  };
  const wrong = ({ status, body }) => {
    if (status !== 200) return body.error;
    return body.failed ?? body.diagnostics.filter((d) => d.severity === "error").map((d) => `${d.code}: ${d.message}`).join(" ");
  };

  const ALONE = "Choose a layout to see it beside the present one.";
  let columns = start.columns ?? null; // the layouts beside the present one: { kind, name }; null: those of the file
  let compared = ""; // the question that the columns on the page are the answer to
  const compare = async () => {
    if ($("compare").hidden || (shown === null)) return;
    if (columns?.length === 0) {
      compared = "";
      $("compare").classList.remove("busy");
      $("compare-said").textContent = ALONE;
      return put($("compared"), "");
    }
    const entries = { ...question(), columns: columns ?? [] };
    const asked = JSON.stringify(entries);
    if (asked === compared) return;
    $("compare").classList.add("busy");
    const reply = await inTurn("/compare", entries);
    if (asked !== JSON.stringify({ ...question(), columns: columns ?? [] }) || reply.status === 409) return;
    $("compare").classList.remove("busy");
    $("compare-said").replaceChildren(...worded(wrong(reply)));
    if (wrong(reply)) return;
    compared = asked;
    if (!reply.body.columns.length) $("compare-said").textContent = ALONE;
    put($("compared"), reply.body.html);
    offerColumns(choices, reply.body.columns);
  };
  const setColumns = (next) => {
    columns = next;
    offerColumns(choices);
    compare();
    remember();
  };
  let choices = { layouts: [], sbps: [] };
  const offerColumns = (known, present = columns ?? []) => {
    choices = known;
    const is = (one) => (other) => one.kind === other.kind && one.name === other.name;
    const every = [...known.layouts.map((name) => ({ kind: "layout", name })), ...known.sbps.map((name) => ({ kind: "sbp", name }))];
    const others = every.filter((one) => !present.some(is(one)));
    $("beside").replaceChildren(new Option("add a layout", ""), ...others.map(({ kind, name }) => new Option(name, `${kind}:${name}`)));
    $("columns").replaceChildren(...present.map((one) => {
      const made = button(`${one.name || "none"} ×`, () => setColumns(present.filter((other) => !is(one)(other))));
      made.setAttribute("aria-label", `Leave out ${one.name || "no layout"}`);
      return made;
    }));
    $("beside").onchange = ({ target }) => {
      const [kind, ...name] = target.value.split(":");
      setColumns([...present, { kind, name: name.join(":") }].slice(-MOST_COLUMNS));
    };
  };

  let searching = null; // { asked, since, found }: the sentence on what is found so far
  const endSearch = (words) => {
    searching = null;
    $("search").textContent = "Search layouts";
    $("found").classList.remove("busy");
    $("found-said").replaceChildren(...worded(words));
  };
  const cutShort = (words) => endSearch(`${searching.found} ${words}`.trim());
  const search = async () => {
    if (searching) return cutShort("The search was stopped.");
    const mine = (searching = { asked: JSON.stringify(question()), since: performance.now(), found: "" });
    $("tab-found").hidden = false;
    turn($("tab-found"));
    $("search").textContent = "Stop the search";
    $("found").classList.add("busy");
    $("found-said").textContent = "Searching …";
    $("layouts").replaceChildren();
    for (;;) {
      const reply = await inTurn("/search", JSON.parse(mine.asked));
      if (searching !== mine) return;
      if (wrong(reply)) return endSearch(wrong(reply));
      mine.found = reply.body.sentence;
      tellFound(reply.body, text.value);
      if (!reply.body.more) return endSearch(`${reply.body.sentence} ${reply.body.note}`);
      if (performance.now() - mine.since > SEARCHED) return endSearch(`${reply.body.sentence} ${reply.body.note} It was stopped after ten seconds: \`meshdsl search\` has no time limit.`);
    }
  };
  const tellFound = ({ sentence, head, layouts }, of) => {
    $("found-said").textContent = `${sentence} Searching on …`;
    const line = (cells) => {
      const row = make("tr");
      row.append(...cells);
      return row;
    };
    const rows = layouts.map(({ layout, figures, name, fix }) => {
      const into = button("Use", () => {
        if (of !== text.value) return ($("found-said").textContent = "The program has changed: search again.");
        apply(fix);
        spelled.layout = `layout:${name}`;
        refresh();
      });
      into.title = fix.title;
      const beside = button("Compare", () => {
        turn($("tab-compare"));
        setColumns([...(columns ?? []).filter((c) => c.name !== layout), { kind: "layout", name: layout }].slice(-MOST_COLUMNS));
      });
      const cell = make("td");
      cell.append(into, " ", beside);
      return line([cell, ...figures.map((figure, i) => (i ? make("td", figure) : make("td", figure, "rules")))]);
    });
    $("layouts").replaceChildren(line([make("th"), ...head.map((h) => make("th", h))]), ...rows);
  };

  // --- the result ------------------------------------------------------------------------------

  let shown = null;

  const tell = (result) => {
    shown = result;
    $("result").hidden = false;
    $("totals").replaceChildren(...result.totals.map(([name, value]) => {
      const group = make("div");
      group.append(make("dt", name), make("dd", value));
      return group;
    }));
    tellLines(result);
    lookOn();
  };
  // The other views are drawn when one of them is looked at.
  let views = null;
  let drawn = ""; // the question that they are the answer to
  const VIEWS = ["devices", "time", "emitted"];
  const view = async () => {
    const asked = JSON.stringify(question());
    if (!shown || asked === drawn || VIEWS.every((id) => $(id).hidden)) return;
    const reply = await inTurn("/views", JSON.parse(asked));
    if (reply.status !== 200 || !reply.body.views || asked !== JSON.stringify(question())) return;
    [views, drawn] = [reply.body.views, asked];
    put($("grid"), views.mesh);
    put($("time"), views.time);
    const before = $("picture").value;
    $("picture").replaceChildren(...views.pictures.map((p) => new Option(p.title, p.title)));
    if (views.pictures.some((p) => p.title === before)) $("picture").value = before;
    tellPicture();
    tellCode();
  };
  const lookOn = () => {
    view();
    compare();
  };
  const tellLines = (result) => {
    const open = new Set([...$("lines").querySelectorAll("details[open] > summary")].map((s) => s.textContent));
    put($("lines"), result.report);
    for (const summary of $("lines").querySelectorAll("summary")) summary.parentElement.open = open.has(summary.textContent);
    for (const number of $("lines").querySelectorAll("th.line .number")) {
      const line = Number(number.textContent);
      if (!Number.isInteger(line)) continue;
      const made = button(number.textContent.trim(), () => jump(offsetOf(line)));
      made.setAttribute("aria-label", `Line ${line}: show it in the program`);
      number.replaceWith(made);
      made.closest("tbody").dataset.line = line;
    }
    here();
  };
  const WIDE = matchMedia("(min-width: 60.01rem)"); // both sides have scroll bars of their own
  let last = 0;
  const here = () => {
    const line = lineAt(text.selectionStart);
    for (const body of $("lines").querySelectorAll("tbody[data-line]")) body.classList.toggle("here", Number(body.dataset.line) === line);
    if (line !== last && WIDE.matches && $("problems").hidden) $("lines").querySelector(".here")?.scrollIntoView({ block: "nearest" });
    last = line;
  };
  const tellPicture = () => {
    const found = views.pictures.find((p) => p.title === $("picture").value);
    $("picture").parentElement.hidden = !views.pictures.length;
    put($("pictured"), found?.html ?? "");
    for (const details of $("pictured").querySelectorAll("details")) details.open = true;
  };
  const tellCode = () => {
    if (!views) return;
    if ($("whole").checked) $("python").textContent = views.code.whole;
    else put($("python"), views.code.bare);
  };

  const tabs = [...document.querySelectorAll("[role='tab']")];
  const turn = (tab) => {
    for (const other of tabs) {
      other.setAttribute("aria-selected", String(other === tab));
      other.tabIndex = other === tab ? 0 : -1;
      $(other.getAttribute("aria-controls")).hidden = other !== tab;
    }
    lookOn();
    remember();
  };
  const STEPS = { ArrowRight: 1, ArrowLeft: -1 };
  for (const tab of tabs) {
    tab.addEventListener("click", () => turn(tab));
    tab.addEventListener("keydown", (event) => {
      if (!(event.key in STEPS)) return;
      const there = tabs.filter((other) => !other.hidden);
      const next = there[(there.indexOf(tab) + STEPS[event.key] + there.length) % there.length];
      turn(next);
      next.focus();
    });
  }

  // --- the file --------------------------------------------------------------------------------

  let kept = start.text;
  let digest = start.digest;
  const tellSaved = (words = "") => {
    const changed = text.value !== kept;
    $("save").hidden = !start.writable;
    $("save").disabled = !changed;
    const plain = start.writable ? "edited, not saved"
      : isAlone ? "edited; the address of this page has the edits" : "edited; nothing is written to the file";
    $("saved").textContent = words || (changed ? plain : "");
  };
  const save = async () => {
    if (!start.writable || text.value === kept) return;
    const sent = text.value;
    try {
      const { status, body } = await ask("/save", { text: sent, digest });
      if (status === 200) [kept, digest] = [sent, body.digest];
      tellSaved(status === 200 ? "saved" : `not saved: ${body.error}`);
    } catch {
      tellSaved("not saved: the server is gone");
    }
  };
  const look = async () => {
    if (isAlone) return;
    try {
      const { status, body } = await ask("/state");
      if (status !== 200 || body.digest === digest) return;
      if (text.value !== kept) return tellSaved("the file has changed on disk; these edits are not in it");
      [kept, digest] = [body.text, body.digest];
      text.value = body.text;
      edited();
      tellSaved("read anew from disk");
    } catch { /* said at the next question */ }
  };

  // --- a page without a server: its address has the program ---------------------------------

  const entitle = (name) => {
    document.title = `${name}: meshdsl`;
    document.querySelector("h1").textContent = `${name}.mdsl`;
  };
  // The question, and what else the page shows: the compared columns, and the view unless it is the first one.
  const state = () => {
    const view = SHARED_VIEWS.find((id) => !$(id).hidden);
    const entries = Object.entries({ ...question(), columns, view: view ?? null });
    return Object.fromEntries(entries.filter(([, value]) => value !== null));
  };
  let remembered = ""; // the state that the address has, or will have
  let remembering = Promise.resolve();
  const remember = () => {
    const now = state();
    const words = JSON.stringify(now);
    if (isAlone && words !== remembered) {
      remembered = words;
      remembering = packed(now).then((code) => words === remembered && history.replaceState(null, "", `#code=${code}`));
    }
    return remembering;
  };
  const share = async () => {
    await remember();
    let words = "Link copied";
    try {
      await navigator.clipboard.writeText(location.href);
    } catch {
      words = "Copy the address of this page";
    }
    $("share").textContent = words;
    setTimeout(() => ($("share").textContent = "Copy link"), 2000);
  };
  const open = (example) => {
    Object.assign(chosen, { program: null, mesh: null, layout: null, sbp: null, cluster: null, sizes: {} });
    Object.assign(spelled, { layout: LAYOUT.first, mesh: LAYOUT.first });
    columns = null;
    entitle(example.name);
    replace(0, text.value.length, example.text);
    text.setSelectionRange(0, 0);
    $("editor").scrollTop = 0;
    refresh();
  };

  // --- hands on --------------------------------------------------------------------------------

  const edited = () => {
    recolour();
    remark();
    draw();
    colour();
    tellSaved();
    refresh(pause());
  };
  text.addEventListener("input", edited);
  document.addEventListener("selectionchange", () => document.activeElement === text && here());
  $("save").addEventListener("click", save);
  $("search").addEventListener("click", search);
  $("share").hidden = !isAlone;
  $("share").addEventListener("click", share);
  addEventListener("hashchange", () => isAlone && location.reload()); // another link; ours cause no event
  $("examples-field").hidden = !start.examples.length;
  $("examples").append(...start.examples.map((example, i) => new Option(example.name, i)));
  $("examples").addEventListener("change", ({ target }) => {
    if (target.value !== "") open(start.examples[target.value]);
    target.value = "";
  });
  document.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.key.toLowerCase() !== "s") return;
    event.preventDefault();
    save();
  });
  addEventListener("focus", look);
  addEventListener("beforeunload", (event) => start.writable && text.value !== kept && event.preventDefault());

  $("choices").addEventListener("submit", (event) => event.preventDefault());
  for (const [id, set] of Object.entries({
    program: (v) => (chosen.program = v),
    layout: (v) => (spelled.layout = v),
    mesh: (v) => (spelled.mesh = v),
    reduce: (v) => (chosen.reduce = v),
    cluster: (v) => (chosen.cluster = v || null),
  })) {
    $(id).addEventListener("change", () => {
      set($(id).value);
      showFields();
      refresh();
    });
  }
  for (const id of ["rules", "axes"]) $(id).addEventListener("input", () => refresh(PAUSE));
  $("dims").addEventListener("input", ({ target }) => {
    if (/^\d{1,15}$/.test(target.value)) chosen.sizes[target.name] = Number(target.value);
    else delete chosen.sizes[target.name];
    refresh(PAUSE);
  });
  $("picture").addEventListener("change", tellPicture);
  $("whole").addEventListener("change", tellCode);
  $("copy").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText($("python").textContent);
      $("copy").textContent = "Copied";
    } catch {
      $("copy").textContent = "Select it and press Ctrl-C";
    }
    setTimeout(() => ($("copy").textContent = "Copy"), 2000);
  });

  const fit = () => document.documentElement.style.setProperty("--top", `${document.querySelector("header").offsetHeight}px`);
  new ResizeObserver(fit).observe(document.querySelector("header"));

  text.value = start.text;
  text.setSelectionRange(0, 0);
  offer({ programs: [], layouts: [], sbps: [], meshes: [], dims: {} });
  remembered = JSON.stringify(state());
  if (start.linked) entitle("program");
  if (start.view) turn($(`tab-${start.view}`));
  edited();
  if (start.broken) tellSaved("the address of this page has no program that can be read");
  refresh();
})();
