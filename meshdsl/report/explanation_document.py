"""What `explain` says to people: a document of the facts that `explanation` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from meshdsl.diagnostics import Source
from meshdsl.placed.sub_axes import size_of_part, whole_axis
from meshdsl.report.document import (
    Block,
    Document,
    Gap,
    Item,
    Note,
    Paragraph,
    Picture,
    Piece,
    Section,
    SourceLine,
    Table,
    Text,
    counted,
    duration,
    human,
    line,
    mesh_text,
    plain,
    scaled,
)
from meshdsl.report.memory_kinds import KINDS, at_peak
from meshdsl.report.pipeline_facts import (
    by_stage,
    pipeline_sentence,
)
from meshdsl.report.predicted_times import timed_in_all, timed_item, timed_sentence
from meshdsl.report.shard_view import Holding

if TYPE_CHECKING:
    from meshdsl.report.schema import (
        CollectiveFacts,
        LineTime,
        MovedFacts,
        OffloadedFacts,
        ReportFacts,
        RuleFacts,
        TensorFacts,
        WarningFacts,
    )

MOST_REMEDIES = 3
"""The most remedies that are named for one collective, or for the whole program."""

LOOP_WORDS = {
    "carried": "carried through {trips} iterations",
    "kept": "kept from {trips} iterations",
    "stacked": "stacked over {trips} iterations, {held} held through the loop",
}
"""The words for a tensor that a loop carries, stores for the backward pass, or stacks."""


def explanation(report: ReportFacts, sources: Mapping[str, Source]) -> Document:
    """The whole report as a document. `sources`, by name, are the texts whose tensors are shown.

    Lines of the first source come before those of others.
    """
    lines = listing(report, sources, listed(report, sources), report["collectives"])
    return (*summary(report), lines, Gap(), *_totals_of(report))


def summary(report: ReportFacts, largest: bool = True) -> Iterator[Block]:
    """What is sent, and the `largest` of what sends it; then axes that are of no use."""
    yield line(sentence(report), "strong")
    if report["collectives"] and largest:
        yield line(_largest(report))
    if "bounded" in report:
        yield line(f"A cheaper plan may exist: {report['bounded']} was searched.")
    if "pipeline" in report:
        yield line(pipeline_sentence(report["pipeline"], predicted="time" in report))
    if "time" in report:
        yield line(timed_sentence(report["time"]))
    for axis, size in _idle(report):
        yield line(f"Axis {axis} splits nothing: its {size} devices all do the same work.")


def _idle(report: ReportFacts) -> Iterator[tuple[str, int]]:
    """The axes that split nothing, with their sizes; of an axis in parts, the parts."""
    components = {item for t in report["tensors"] for item in t["placement"].items()}
    used = {axis for axis, component in components if component != "B"}
    for axis, size in report["mesh"].items():
        parts = sorted({a for a, _ in components if a != axis and whole_axis(a) == axis})
        if axis in used or size == 1:
            continue
        if used.isdisjoint(parts):
            yield axis, size
        else:
            yield from ((part, size_of_part(part)) for part in parts if part not in used)


def sentence(report: ReportFacts) -> str:
    """`mlp under layout hybrid on mesh rows:2, cols:2 (4 devices): 2 collectives send …`."""
    axes = mesh_text(report["mesh"])
    devices = counted(report["devices"], "device")
    mesh = f"mesh {axes} ({devices})" if axes else devices
    where = f"{report['program']} under layout {report['layout']} on {mesh}"
    count, sent = report["totals"]["collectives"], report["totals"]["wire_bytes"]
    if not count:
        return f"{where}: nothing is sent."
    verb = "sends" if count == 1 else "send"
    return f"{where}: {counted(count, 'collective')} {verb} {human(sent)} per device."


def compressed(report: ReportFacts) -> Iterator[Block]:
    """How gradients are compressed, and what that means for their numbers."""
    if "compress" not in report:
        return
    warmup = report.get("warmup")
    compressed = "The momentum is" if warmup else "Gradients are"
    told = f"{compressed} compressed by {report['compress']}"
    if "workers" in report:
        by = counted(report["workers"], "worker")
        yield line(
            f"{told}, by each of {by} for itself: with another number of them, or another "
            "split of the batch, the numbers are others."
        )
    elif warmup:
        yield line(f"{told}; one worker compresses what it has for itself.")
    else:
        yield line(
            f"{told}, which sees only their mean: under any layout the numbers are those of "
            "one device."
        )
    if warmup:
        count = warmup["collectives"]
        verb = "sends" if count == 1 else "send"
        sent = f"{counted(count, 'collective')} {verb} {human(warmup['wire_bytes'])} per device"
        sent = sent if count else "nothing is sent"
        yield line(
            f"The first {counted(warmup['steps'], 'step')} of a training compress nothing: {sent} "
            f"in each, and memory peaks at {human(warmup['peak'])}. "
            "All other figures are for the steps after them."
        )


def planned(report: ReportFacts, brief: bool = False) -> Iterator[Block]:
    """The claim of the plan, and unless `brief` its objective and the extent of its search.

    Nothing where nothing is sent.
    """
    plan = report["plan"]
    if not plan or not report["collectives"]:
        return
    message = plan["message_bytes"]
    cost = f"bytes + {human(message)} for each collective before bucketing" if message else "bytes"
    cost = "predicted time" if "objective" in plan else cost
    more = "" if brief else f" (counted: {cost}; searched: {plan['searched']})"
    yield line(f"{plan['claim']}{more}.")
    if remedies := report["remedies"]:
        yield line("Rules that make it send less:")
        yield from (_headed(" ", remedy["summary"]) for remedy in remedies[:MOST_REMEDIES])


def _largest(report: ReportFacts) -> str:
    """The collective that sends the most."""
    collectives = report["collectives"]
    most = max(collectives, key=lambda c: c["wire_bytes"])
    share = 100 * most["wire_bytes"] / max(sum(c["wire_bytes"] for c in collectives), 1)
    times = "" if most["count"] == 1 else f", {most['count']} times"
    whose = _bucket(most) or most["tensor"]
    what = f"{most['kind']} of {whose} over {'+'.join(most['axes'])}, line {most['line']}{times}"
    which = f"The largest ({share:.0f}%)" if len(collectives) > 1 else "The only one"
    return f"{which}: {what}."


# --- source lines ----------------------------------------------------------------------------


def listed(report: ReportFacts, sources: Mapping[str, Source]) -> list[TensorFacts]:
    """The tensors to show: of the sources, named or else bound as no named one beside them.

    Less those remade per loop iteration.
    """
    shown = (t for t in report["tensors"] if t["name"] or t["between"])
    return [t for t in shown if t["file"] in sources and _told(t)]


def place_of(entry: TensorFacts | CollectiveFacts) -> tuple[str, int]:
    """The file and line of an entry; a tensor that a `repeat` carries or keeps is on its line."""
    loop = entry["loop"] if "loop" in entry else None
    return entry["file"], entry["line"] if loop is None else loop["line"]


def listing(
    report: ReportFacts,
    sources: Mapping[str, Source],
    tensors: Sequence[TensorFacts],
    collectives: Sequence[CollectiveFacts],
) -> Table:
    """The source lines of tensors and collectives: those of the first file in order, then others.

    Lines with collectives have blank lines around them.
    """
    first = next(iter(sources), "")
    places = {*map(place_of, tensors), *map(place_of, collectives)}
    sections, sends = [], True
    for place in sorted(places, key=lambda place: (place[0] != first, place)):
        tensors_here = [t for t in tensors if place_of(t) == place]
        sent = [c for c in collectives if place_of(c) == place]
        before, sends = sends, bool(sent)
        sections.append(section(report, sources, place, tensors_here, sent, before or sends))
    return Table(tuple(sections))


def section(
    report: ReportFacts,
    sources: Mapping[str, Source],
    place: tuple[str, int],
    tensors: Sequence[TensorFacts],
    collectives: Sequence[CollectiveFacts],
    apart: bool = True,
    brief: bool = False,
) -> Section:
    """A source line, and below it tensors and collectives, these in three lines each if `brief`."""
    file, number = place
    gutter = _gutter(report, sources)
    where = "" if file == next(iter(sources), "") else f"{file} "
    text = sources[file].excerpt(number) if file in sources else None
    width = max((len(t["name"] or "") for t in tensors), default=0)
    items = [tensor_item(t, report["mesh"], gutter + 3, width) for t in tensors]
    items += [timed_item(t, gutter + 3) for t in _times_at(report, place)]
    named = {t["name"] for t in report["tensors"]}
    note = brief_note if brief else collective_note
    sent = [note(c, c["tensor"] in named, gutter + 3) for c in collectives]
    return Section(SourceLine(f"{where}{number:>{gutter}}", text), (*items, *sent), apart)


def _times_at(report: ReportFacts, place: tuple[str, int]) -> Sequence[LineTime]:
    """The predicted time of a line, where there is one."""
    lines = report["time"]["lines"] if "time" in report else ()
    return [t for t in lines if (t["file"], t["line"]) == place]


def _told(tensor: TensorFacts) -> bool:
    return tensor["loop"] is None or tensor["loop"]["as"] in LOOP_WORDS


def _gutter(report: ReportFacts, sources: Mapping[str, Source]) -> int:
    """The width of line numbers; tensors of the prelude are not listed."""
    tensors = [t for t in report["tensors"] if t["file"] in sources]
    lines = [e["line"] for e in (*tensors, *report["collectives"])]
    return len(str(max(lines, default=1)))


# --- a tensor --------------------------------------------------------------------------------


def tensor_item(
    tensor: TensorFacts, mesh: Mapping[str, int], indent: int = 0, width: int = 0
) -> Item:
    """`h  f32[batch@rows 64→32, hidden@cols 2048→1024]  line 8: batch -> rows, hidden -> cols`."""
    held = Holding.of(tensor, mesh)
    head = (Piece(f"{held.name:{width}}  ", "name"),)
    asides = (_rules(tensor), _rules(tensor, short=True))
    picture = Picture(lambda: _drawn(held), f"{held.name}: {type_text(tensor)}", extra=True)
    return Item(head, typed(tensor), asides if asides[0] else (), picture, indent)


def _drawn(held: Holding) -> str:
    """The picture of a tensor for a line of a table, where somebody draws it."""
    from meshdsl.report.pictures import thumbnail

    return thumbnail(held)


def type_text(tensor: TensorFacts) -> str:
    """The type with global sizes, arrows to local ones of split dims, and partial axes."""
    return plain(typed(tensor))


def typed(tensor: TensorFacts) -> Text:
    """The type in pieces; the style of a split dim has the number of its first axis."""
    sizes = zip(tensor["dims"], tensor["shape"], tensor["local_shape"], strict=True)
    dims = [_dim(d, n, local, tensor) for d, n, local in sizes]
    separated = [part for dim in dims for part in (Piece(", ", "code"), dim)][1:]
    partial = {a: c for a, c in tensor["placement"].items() if c.startswith("P")}
    kind = next(iter(partial.values()), "")[2:-1] or "sum"
    over = ", ".join(partial)
    tail = [Piece(f", a partial {kind} over {over}", "code")] if partial else []
    alone = tensor.get("on", {}).items()
    tail += [Piece(f", only where {axis} = {device}", "code") for axis, device in alone]
    return (Piece(f"{tensor['dtype']}[", "code"), *separated, Piece("]", "code"), *tail)


def _dim(name: str, size: int, local: int, tensor: TensorFacts) -> Piece:
    axes = tensor["order"].get(name, [])
    if not axes:
        return Piece(f"{name} {size}", "code")
    over = axes[0] if len(axes) == 1 else f"({', '.join(axes)})"
    number = list(tensor["placement"]).index(axes[0])
    return Piece(f"{name}@{over} {size}→{local}", axis=number)


def _rules(tensor: TensorFacts, short: bool = False) -> str:
    """The rules that split a tensor, by line; and whether a loop carries or keeps it.

    `short` omits rules that the dims already show: those without a selector.
    """
    loop = tensor["loop"] if _told(tensor) else None
    advice = "; name it, for a rule of its own" if tensor["between"] else ""
    notes = []
    if loop:
        held = human(loop.get("bytes", 0))
        notes.append(LOOP_WORDS[loop["as"]].format(trips=loop["trips"], held=held))
    by_place: dict[str, list[str]] = {}
    for dim in (d for d in tensor["dims"] if d in tensor["order"]):
        rule = tensor["rules"].get(dim, {"rule": dim})
        by_place.setdefault(_place(rule, tensor["file"]), []).append(rule["rule"])
    plain = len(by_place) == 1 and not any(":" in r for rs in by_place.values() for r in rs)
    for place, rules in by_place.items():
        notes.append(place if short and plain else f"{place}: {', '.join(rules)}")
    return "; ".join(notes) + advice


def _place(rule: RuleFacts, file: str) -> str:
    if "line" not in rule:
        return "by the operator that makes it"
    where: str = rule["file"]
    return f"line {rule['line']}" if where == file else where


# --- a collective ----------------------------------------------------------------------------


def collective_note(c: CollectiveFacts, named: bool, indent: int) -> Note:
    """A collective: bytes, formula, change of placement, reason, and remedy."""
    details = [("bytes", f"{_formula(c)}{c['trip_bytes']:,} B {_inputs(c)}")]
    if "balanced_bytes" in c:
        balanced = f"{c['balanced_bytes']:,} B sent where all groups have as many rows"
        details.append(("balanced", balanced))
    if "seconds" in c:
        details.append(("time", duration(c["seconds"])))
    details += [("only", f"where {axis} = {device}") for axis, device in c.get("on", {}).items()]
    details += _parts(c) if c["parts"] else [("from", c["from"]), ("to", c["to"])]
    details += [("why", text) for text in _reasons(c, lambda part: part["why"])]
    details += [("remove it", text) for text in _remedies(c)]
    whose = c["tensor"] if named else f"a subexpression (`{c['tensor']}`)"
    head = (Piece("=> ", "arrow"), *sending(c, _bucket(c) or whose))
    return Note(head, _labelled(details, indent + 3), indent)


def brief_note(c: CollectiveFacts, named: bool, indent: int) -> Note:
    """A collective in three lines: what it sends, the cause, and the best remedy, if there is one.

    Of a bucket the cause is that of its largest tensor.
    """
    largest = max(c["parts"], key=lambda part: part["payload_bytes"], default=c)
    details = [("why", largest["cause"]), *(("remove it", text) for text in _remedies(c)[:1])]
    whose = _bucket(c) or (c["tensor"] if named else "a subexpression")
    head = (Piece("=> ", "arrow"), *sending(c, whose, brief=True))
    return Note(head, _labelled(details, indent + 3), indent)


def _labelled(details: Sequence[tuple[str, str]], indent: int) -> tuple[Item, ...]:
    return tuple(
        Item((Piece(f"{label + ':':11}", "muted"),), (Piece(text),), indent=indent)
        for label, text in details
    )


def sending(c: CollectiveFacts, whose: str, brief: bool = False) -> Text:
    """The text `all_reduce sum of y over cols: 64 KiB sent per device`.

    If `brief`, `all_reduce sum of y over cols: 64 KiB`.
    """
    phase = "" if c["phase"] == "forward" else f" [{c['phase']}]"
    op = f" {c['op']}" if c["op"] else ""
    head = f"{c['kind']}{op} of {whose} over {'+'.join(c['axes'])}{phase}"
    trips = "" if c["count"] == 1 else f" in all {c['count']:,} {_unit(c)}s"
    most = "at most " if "balanced_bytes" in c else ""
    amount = f"{most}{human(c['wire_bytes'])}{trips}" if brief else _sent(c)
    return (Piece(head, "sent"), Piece(f": {amount}", "amount"))


def _unit(c: CollectiveFacts) -> str:
    """What a collective is repeated in: a send between stages is a message of each micro-batch."""
    return "message" if c["kind"] == "send" else "iteration"


def _bucket(c: CollectiveFacts) -> str:
    """The text `3 tensors sent together`; empty for a collective on one tensor."""
    return f"{counted(len(c['parts']), 'tensor')} sent together" if c["parts"] else ""


def _parts(c: CollectiveFacts) -> list[tuple[str, str]]:
    """The tensors of a bucket, a line for each."""
    return [
        (
            "holds",
            f"{p['tensor']} (line {p['line']}), {p['payload_bytes']:,} B: {p['from']} → {p['to']}",
        )
        for p in c["parts"]
    ]


def _reasons(c: CollectiveFacts, texts: Callable[[MovedFacts], str]) -> list[str]:
    """The reasons; in a bucket each with its tensors."""
    whose: dict[str, list[str]] = {}
    for part in c["parts"]:
        whose.setdefault(texts(part), []).append(part["tensor"])
    if len(whose) < 2:
        return [texts(c)]
    return [f"{', '.join(names)}: {text}" for text, names in whose.items()]


def _remedies(c: CollectiveFacts) -> list[str]:
    """The best remedies of a collective; in a bucket each with its tensors, if not all."""
    whose: dict[str, list[str]] = {}
    for part in c["parts"]:
        for text in part["remedies"]:
            whose.setdefault(text, []).append(part["tensor"])
    of_some = {text: names for text, names in whose.items() if len(names) < len(c["parts"])}
    told = [f"{', '.join(of_some[t])}: {t}" if t in of_some else t for t in c["remedies"]]
    return told[:MOST_REMEDIES]


def _sent(c: CollectiveFacts) -> str:
    """`64 KiB sent per device`; in a loop per iteration, and in total."""
    meanwhile = " while it computes" if c["overlapped"] else ""
    most = "at most " if "balanced_bytes" in c else ""
    if c["count"] == 1:  # the digits are in the formula
        return f"{most}{human(c['wire_bytes'])} sent per device{meanwhile}"
    total = f"{most}{human(c['wire_bytes'])} sent per device{meanwhile}"
    unit = _unit(c)
    an = "a" if unit == "message" else "an"
    each, trips = human(c["trip_bytes"]), f"{c['count']} {unit}s"
    if c["trip_bytes"] * c["count"] > c["wire_bytes"]:  # of a device with blocks of several sizes
        return f"up to {each} {an} {unit}, in {trips} {total}"
    return f"{each} {an} {unit} × {trips} = {total}"


def _inputs(c: CollectiveFacts) -> str:
    if "balanced_bytes" in c:
        return f"(there is room for {c['payload_bytes']:,} B on each device)"
    upto = "up to " if "uneven" in c else ""
    return f"(n = {c['group_size']:,} devices, b = {upto}{c['payload_bytes']:,} B on each)"


def _formula(c: CollectiveFacts) -> str:
    """The formula of the bytes sent; of blocks of several sizes the most that a device sends."""
    if "balanced_bytes" in c:
        return "the rows that leave, at most "
    if "uneven" in c and c["kind"] in ("reduce_scatter", "all_to_all"):
        return "b less its own block, at most "
    return f"{c['formula']} = "


# --- totals ----------------------------------------------------------------------------------


def _totals_of(report: ReportFacts) -> Iterator[Block]:
    """Totals: bytes sent, FLOPs, and memory."""
    yield from _sent_in_all(report)
    flops, devices = report["totals"]["flops_per_device"], report["devices"]
    on_all = "" if devices == 1 else f"; {scaled(flops * devices)} on all {devices:,} devices"
    yield Gap()
    yield _headed("Computed per device:", f"{scaled(flops)}{on_all}")
    yield Gap()
    if "time" in report:
        yield from timed_in_all(report["time"])
        yield Gap()
    yield from held(report)
    yield from frozen(report)
    yield from away(report)
    yield from by_stage(report)
    if report["warnings"]:
        yield Gap()
        yield from _warnings(report["warnings"])


def _sent_in_all(report: ReportFacts) -> Iterator[Block]:
    total = report["totals"]
    if total["collectives"]:
        sent, cluster = human(total["wire_bytes"]), human(total["cluster_wire_bytes"])
        times = counted(total["collectives"], "collective")
        text = f"{sent} in {times}; {cluster} by all {report['devices']:,} devices"
    else:
        why = "each works on its own" if report["devices"] > 1 else "there is only one"
        text = f"nothing, {why}."
    yield _headed("Sent per device:", text)
    phases = total["by_phase"]
    tables = {"by axis": total["by_axis"], "by kind": total["by_kind"]}
    if len(phases) > 1 or "output" in phases:
        tables["by phase"] = phases
    yield from _amounts([(k, n, v) for k, t in tables.items() for n, v in t.items()], 9)
    yield from planned(report)
    yield from compressed(report)


def _headed(head: str, text: str) -> Item:
    return Item((Piece(f"{head} ", "strong"),), (Piece(text),))


def _amounts(rows: list[tuple[str, str, int]], width: int = 0) -> Iterator[Item]:
    """Rows of (what, name, bytes); `what`, `width` wide, is shown where it changes."""
    names = max((len(name) for _, name, _ in rows), default=0)
    before = ""
    for what, name, value in rows:
        label = what if what != before else ""
        before = what
        head = (Piece(f"  {label:{width}}", "muted"), Piece(f"{name:{names}}  ", "name"))
        yield Item(head, (Piece(human(value)),))


def held(report: ReportFacts) -> Iterator[Item]:
    """The memory of a device at its peak, by kind, and whether one of the cluster has as much."""
    memory = report["memory"]
    peak, of, fits = human(memory["peak"]), "", ""
    if "time" in report:
        limit = report["time"]["device_memory"]
        of = f" of {human(int(limit))}"
        fits = "" if memory["peak"] <= limit else ": IT DOES NOT FIT"
    text = f"{peak}{of} at its peak, line {memory['peak_line']}{fits}"
    yield _headed("Memory per device:", text)
    words = {**KINDS}
    if memory["grads_later"]:
        words["grads"] = f"gradients so far (of {human(memory['grads'])})"
    amounts = at_peak(memory)
    shown = (kind for kind in KINDS if memory[kind] or kind == "activations")
    yield from _amounts([("", words[kind], amounts[kind]) for kind in shown])


def frozen(report: ReportFacts) -> Iterator[Block]:
    """Which parameters are frozen: they take memory, but no gradients and no states."""
    if "frozen" not in report:
        return
    names = report["frozen"]["params"]
    listed = ", ".join(names[:MOST_FROZEN])
    more = f" and {len(names) - MOST_FROZEN} more" if len(names) > MOST_FROZEN else ""
    size = human(report["frozen"]["bytes"])
    yield _headed("Frozen:", f"{listed}{more}; {size} of parameters without gradient or state")


MOST_FROZEN = 8
"""Names of frozen parameters that are shown."""


AWAY = {"disk": "On disk per device:", "host": "In host memory per device:"}
"""What is stored in another memory is headed by this."""


def away(report: ReportFacts) -> Iterator[Block]:
    """What a device stores on disk or on the host, and what a step reads and writes there."""
    if "disk" in report:
        yield from _offloaded("disk", report["disk"])
    if "host" in report:
        yield from _offloaded("host", report["host"])


def _offloaded(where: str, facts: OffloadedFacts) -> Iterator[Item]:
    kinds = {"parameters": facts["params"], "activations": facts["activations"]}
    kinds["states"] = facts["bytes"] - sum(kinds.values())
    of = ", ".join(f"{human(size)} of {kind}" for kind, size in kinds.items() if size)
    text = f"{of}; each step reads {human(facts['read'])} and writes {human(facts['written'])}"
    if facts["chunk"]:
        text += f", {'updates ' if facts['transfers'] else ''}in chunks of"
        text += f" at most {human(facts['chunk'])}"
    yield _headed(AWAY[where], text)
    for each in facts["transfers"]:
        size = human(each["bytes"])
        times = f"{each['count']:,} times {size}" if each["count"] > 1 else size
        beside = ", while it computes" if each["overlapped"] else ""
        head = f"  line {each['line']}: "
        text = f"{each['kind']} {each['tensor']}, {each['phase']}, {times}{beside}"
        yield Item((Piece(head, "muted"),), (Piece(text),))


def _warnings(warnings: list[WarningFacts]) -> Iterator[Block]:
    yield line(counted(len(warnings), "warning").capitalize() + ":", "strong")
    for warning in warnings:
        where = f"line {warning['line']}: " if warning["line"] else ""
        text = f"{warning['code']} {where}{warning['message']}"
        yield Paragraph((Piece(text),), hang=2, indent=2)
