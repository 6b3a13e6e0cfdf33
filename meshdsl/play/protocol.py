"""What the page and its server send each other, as JSON (docs/playground.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict


class PageOptions(TypedDict):
    """The options that a page can choose."""

    program: str | None
    mesh: str | None
    layout: str | None
    sbp: str | None
    cluster: str | None
    reduce: str
    sizes: dict[str, int]


class PageExample(TypedDict):
    """A program to begin with."""

    name: str
    text: str


class PageState(TypedDict):
    """The text of the file, its digest, and the choices that the page begins with.

    `engine` answers the page's questions: the server that it came from, or a web worker.
    """

    engine: Literal["server", "worker"]
    examples: list[PageExample]
    file: str
    text: str
    digest: str | None
    writable: bool
    policies: list[str]
    clusters: list[str]
    chosen: PageOptions


class TextQuestion(TypedDict):
    """A text."""

    text: str


class SaveQuestion(TextQuestion):
    """A text to be written, and the digest of the file that the page read."""

    digest: str


class CompileQuestion(TextQuestion, PageOptions):
    """A text, and the options to compile it with."""


class PageColumn(TypedDict):
    """A layout, by name or written out, or an `sbp` block: one column of a comparison."""

    kind: Literal["layout", "sbp"]
    name: str


class CompareQuestion(CompileQuestion):
    """A question, and what stands beside the layout that it chooses."""

    columns: list[PageColumn]


class Runs(TypedDict):
    """The words of a text: lengths in UTF-16 units, and classes."""

    runs: list[tuple[int, str]]


class Saved(TypedDict):
    """The digest of the file that was written."""

    digest: str


class CompileJob(TypedDict):
    """What the compiling process is asked: `options` are fields of `Options`."""

    kind: Literal["compile", "views", "search", "compare"]
    name: str
    text: str
    options: Mapping[str, Any]
    columns: list[PageColumn]


class Choices(TypedDict):
    """The names that a file declares, and the sizes of its dims."""

    programs: list[str]
    layouts: list[str]
    sbps: list[str]
    meshes: list[str]
    dims: dict[str, int]


class PagePlace(TypedDict):
    """A place: in the text by its offsets, elsewhere by the name of a file or a field."""

    line: int
    column: int
    start: NotRequired[int]
    end: NotRequired[int]
    file: NotRequired[str]


class PageEdit(TypedDict):
    """A text in the place of a part of the page's text."""

    start: int
    end: int
    text: str


class PageFix(TypedDict):
    """A way out that can be carried out."""

    title: str
    edits: list[PageEdit]


class PageNote(TypedDict):
    """Another place that a diagnostic speaks of."""

    message: str
    where: PagePlace


class PageDiagnostic(TypedDict):
    """A diagnostic."""

    code: str
    severity: str
    message: str
    help: str | None
    where: PagePlace | None
    related: list[PageNote]
    fixes: list[PageFix]


class PagePicture(TypedDict):
    """A picture of a tensor or a collective, as markup, and its line."""

    title: str
    line: int
    html: str


class PageCode(TypedDict):
    """The text of the program: what every device runs, as markup, and the whole."""

    bare: str
    whole: str


class PageResult(TypedDict):
    """What is read first: the sentence, the figures, and the report as markup."""

    sentence: str
    totals: list[tuple[str, str]]
    report: str


class PageViews(TypedDict):
    """The other views, each as markup, and the text of the program."""

    time: str
    mesh: str
    pictures: list[PagePicture]
    code: PageCode


class ViewsAnswer(TypedDict):
    """The views; None where the program has errors."""

    views: PageViews | None


class PageAnswer(TypedDict):
    """The diagnostics, the names to choose from, and the result, None where there are errors."""

    choices: Choices
    diagnostics: list[PageDiagnostic]
    result: PageResult | None


class PageLayout(TypedDict):
    """A layout that was found: what `--layout` takes, its figures, and a name that is free.

    `fix` puts it into the program under that name.
    """

    layout: str
    figures: list[str]
    name: str
    fix: PageFix


class SearchAnswer(TypedDict):
    """The layouts found so far, the best first, under the `head` of their figures.

    Where there is `more` to be tried, the same question goes on with the search.
    """

    diagnostics: list[PageDiagnostic]
    sentence: str
    note: str
    head: list[str]
    layouts: list[PageLayout]
    more: bool


class CompareAnswer(TypedDict):
    """The columns side by side, as markup; empty where the first one is wrong.

    `columns` are those beside the present layout.
    """

    columns: list[PageColumn]
    diagnostics: list[PageDiagnostic]
    html: str


JobAnswer: TypeAlias = PageAnswer | ViewsAnswer | SearchAnswer | CompareAnswer
"""The answer to a job, by its `kind`."""


class Failed(TypedDict):
    """What went wrong with the compiler itself."""

    failed: str
