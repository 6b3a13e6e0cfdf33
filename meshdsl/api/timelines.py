"""The result of `md.schedule`: a pipeline schedule over time, alone or beside others."""

from __future__ import annotations

from fractions import Fraction
from functools import cached_property, partial

from meshdsl.api.errors import told
from meshdsl.report.document import Block, Document, Gap, Grid, Picture, line
from meshdsl.report.schedule_charts import chart, described, in_words, sentence, shown
from meshdsl.report.schedule_picture import schedule_picture, unit_of
from meshdsl.report.schedule_schema import LawFacts, ScheduleFacts, SlicingFacts
from meshdsl.report.slicing_table import described as slicing_facts
from meshdsl.report.slicing_table import shown as slicing_shown
from meshdsl.report.terminal import text as written
from meshdsl.report.views.parts import WIDTH, View
from meshdsl.schedule.csv_files import written as csv_text
from meshdsl.schedule.csv_files import written_for_torch
from meshdsl.schedule.requested import SlicedSequence
from meshdsl.schedule.times import TimedSchedule

IN_PYTHON = '`.save("FILE.svg")`'
"""What draws a chart that is too large for a text."""


class ScheduleTimeline(View):
    """A pipeline schedule over time, as `meshdsl schedule` prints it; in a notebook a picture.

    `json` is the same as data (version 1). Times are exact, in the unit of the times that are
    given: `makespan` is the time of a step, `bubble` the share of all devices' time that is idle.

    >>> import meshdsl as md
    >>> found = md.schedule("one_f_one_b", stages=4, micro=8)
    >>> found.makespan, found.bubble, found.in_flight
    (Fraction(30, 1), Fraction(1, 5), (4, 3, 2, 1))
    >>> found.laws[0]["formula"], found.laws[0]["share"]
    ('(D - 1) / (N + D - 1)', '3/11')
    """

    width = WIDTH

    def __init__(self, timed: TimedSchedule) -> None:
        self._timed = timed

    @cached_property
    def json(self) -> ScheduleFacts:
        """The facts."""
        return described(self._timed)

    @property
    def makespan(self) -> Fraction:
        """The time from the first action to the end of the last one."""
        return self._timed.makespan

    @property
    def bubble(self) -> Fraction:
        """The share of all devices' time that is idle."""
        return self._timed.bubble

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches of each device whose activations are stored at once."""
        return self._timed.verified.peaks

    @property
    def laws(self) -> list[LawFacts]:
        """The textbook laws of idle time that hold for this schedule, with their shares."""
        return self.json["laws"]

    @property
    def rows(self) -> list[str]:
        """The actions of each device in order, as `md.schedule` and `md.scheduled` take them."""
        return [device["row"] for device in self.json["devices"]]

    def beside(self, **others: ScheduleTimeline) -> TimelineComparison:
        """This schedule and others below it on one time axis, under the names given."""
        name = self.json["schedule"] or "schedule"
        return TimelineComparison({name: self, **others})

    @property
    def picture(self) -> Picture:
        """The devices over time; in words where there are no pictures."""
        return self.picture_of(None)

    def picture_of(self, unit: float | None) -> Picture:
        """The picture with so many pixels to a unit of time; None: as many as it needs."""
        return Picture(
            partial(schedule_picture, self._timed, unit=unit), in_words(self._timed), extra=True
        )

    @property
    def pixels(self) -> float:
        """The pixels to a unit of time that the picture needs."""
        return unit_of(self._timed)

    @property
    def document(self) -> Document:
        """The picture, what is idle, in flight and sent, and how stale parameters are."""
        return shown(self._timed, self.picture)

    def text(self, width: int | None = None) -> str:
        """The schedule with a chart of text, of at most `width` columns."""
        width = width or self.width
        drawn: Block = chart(self._timed, width, IN_PYTHON)
        return written(shown(self._timed, drawn), width)

    @told
    def csv(self, path: str, torch: bool = False) -> None:
        """Write the table: a line for each device; with `torch`, as its pipelining reads it.

        Raises:
            ProgramError: torch has no word for what the schedule does (MD0531); the system
                refuses to write there (MD0501).
        """
        schedule = self._timed.verified.schedule
        self._write(path, written_for_torch(schedule) if torch else csv_text(schedule))


class TimelineComparison(View):
    """Schedules on one time axis, one below the other, and a table of what they cost."""

    width = WIDTH

    def __init__(self, timelines: dict[str, ScheduleTimeline]) -> None:
        self.timelines = timelines

    def beside(self, **others: ScheduleTimeline) -> TimelineComparison:
        """These schedules, and others below them."""
        return TimelineComparison({**self.timelines, **others})

    @property
    def document(self) -> Document:
        """The pictures, to one scale, and the table."""
        unit = max(each.pixels for each in self.timelines.values())
        blocks: list[Block] = []
        for name, each in self.timelines.items():
            blocks += [line(name, "strong"), each.picture_of(unit), Gap()]
        return (*blocks, self._table)

    @property
    def _table(self) -> Grid:
        head = ("schedule", "takes", "idle", "in flight, by device")
        rows = (
            (
                name,
                str(each.makespan),
                f"{100 * float(each.bubble):.3g} %",
                " ".join(map(str, each.in_flight)),
            )
            for name, each in self.timelines.items()
        )
        return Grid("", head, tuple(rows))

    def text(self, width: int | None = None) -> str:
        """Each with a chart of text, and the table."""
        width = width or self.width
        blocks: list[Block] = []
        for name, each in self.timelines.items():
            drawn = chart(each._timed, width, IN_PYTHON)
            head = sentence(each.json)
            title = head if head.startswith(f"{name}: ") else f"{name}. {head}"
            blocks += [line(title, "strong"), drawn, Gap()]
        return written((*blocks, self._table), width)


class SlicedTimeline(View):
    """The best slices of a sequence in a pipeline, and those of equal size beside them.

    `json` is the same as data (version 1).
    """

    width = WIDTH

    def __init__(self, found: SlicedSequence) -> None:
        self._found = found
        self.json: SlicingFacts = slicing_facts(found.schedule, found.times, found.best, found.even)

    @property
    def document(self) -> Document:
        """The table of slices, and the best ones over time."""
        return (*slicing_shown(self.json), Gap(), ScheduleTimeline(self._found.drawn).picture)

    def text(self, width: int | None = None) -> str:
        """The table, and a chart of text."""
        width = width or self.width
        drawn = chart(self._found.drawn, width, IN_PYTHON)
        return written((*slicing_shown(self.json), Gap(), drawn), width)
