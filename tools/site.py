"""Hooks of mkdocs.yml: what the site shows beyond the Markdown files in docs/.

- Formulas, in the three ways GitHub writes them, become MathML: browsers draw it without a script.
- Notebooks become pages, with the outputs they were committed with.
- Docstrings that explain arguments as "name: meaning" show them as a list.
- The command-line reference, the sheets of the normalizers, the metrics and the claims are written from the code.
- README, CHANGELOG, CONTRIBUTING and SECURITY, which lie outside docs/, are pages too; links to other files outside
  docs/ become plain text.
"""

import html
import json
import re
from importlib.util import find_spec
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    files.append(File.generated(config, "reference/command-line.md", content=command_line()))
    font = Path(find_spec("ziamath").origin).with_name("fonts") / "STIXTwoMath-Regular.ttf"  # the same on every machine
    files.append(File.generated(config, "assets/STIXTwoMath-Regular.ttf", content=font.read_bytes()))
    for notebook in sorted((ROOT / "docs").glob("notebooks/*.ipynb")):
        page = notebook.relative_to(ROOT / "docs").with_suffix(".md")
        files.append(File.generated(config, page.as_posix(), content=notebook_page(notebook)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri in GENERATED:
        markdown = f"{markdown}\n{GENERATED[page.file.src_uri]()}"
    return with_formulas_marked(with_bars_in_code(with_links_into_the_site(markdown, page.file.src_uri)))


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    for anchor in _anchors(page.toc.items):
        anchor.title = with_formulas_drawn(anchor.title)
    return with_formulas_drawn(content)


def _anchors(items: Any) -> list[Any]:
    return [one for item in items for one in (item, *_anchors(item.children))]


# Formulas wait outside the text while Markdown is read, which would take _ and | in them for its own.

CODE_OR_FORMULA = re.compile(
    r"^(?P<indent> *)```math\n(?P<fence>.*?)^ *```$"
    r"|^ *(?P<ticks>```+).*?^ *(?P=ticks)$"
    r"|\$`(?P<quoted>.+?)`\$"
    r"|(?<!`)(?P<tick>`+)(?!`).+?(?<!`)(?P=tick)(?!`)"
    r"|\$\$(?P<display>.+?)\$\$"
    r"|(?<![\\$\w])\$(?P<inline>[^\s$][^$]*)\$(?![\w$])",
    re.MULTILINE | re.DOTALL,
)
MARK = re.compile("\ue000(\\d+)\ue001")
formulas: list[tuple[str, bool]] = []


def with_formulas_marked(markdown: str) -> str:
    def mark(found: re.Match[str]) -> str:
        displayed = found["fence"] or found["display"]
        formula = displayed or found["quoted"] or found["inline"]
        if formula is None:
            return found[0]
        formulas.append((formula.strip(), displayed is not None))
        return f"{found['indent'] or ''}\ue000{len(formulas) - 1}\ue001"

    return CODE_OR_FORMULA.sub(mark, markdown)


def with_formulas_drawn(text: str) -> str:
    def draw(found: re.Match[str]) -> str:
        formula, displayed = formulas[int(found[1])]
        drawn = convert(formula, display="block" if displayed else "inline")
        drawn = re.sub(
            r"<m[io]>([a-z]{2,})</m[io]>", r'<mo lspace="0.1em" rspace="0.17em">\1</mo>', drawn
        )  # log n, max x
        return drawn.replace("<mo>&#x0002F;</mo>", '<mo lspace="0.05em" rspace="0.05em">/</mo>')

    return MARK.sub(draw, text)


def slug(heading: str, separator: str) -> str:
    """The anchor that GitHub gives to a heading."""
    heading = MARK.sub(lambda found: formulas[int(found[1])][0], heading)
    return re.sub(r"[^\w\- ]", "", html.unescape(heading).strip().lower()).replace(" ", separator)


LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>(?!https?:|#|mailto:)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def with_links_into_the_site(markdown: str, source: str) -> str:
    """Links that work on GitHub, as they must be in the site."""
    here = "" if source in OUTSIDE.values() else f"docs/{dirname(source)}"

    def rewrite(found: re.Match[str]) -> str:
        target = normpath(f"{here}/{found['target']}".lstrip("/"))
        if target in OUTSIDE:
            target = OUTSIDE[target]
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
        else:
            return found["text"]
        target = re.sub(r"\.ipynb$", ".md", target)
        return f"[{found['text']}]({relpath(target, dirname(source) or '.')}{found['anchor'] or ''})"

    return LINK.sub(rewrite, markdown)


def with_bars_in_code(markdown: str) -> str:
    """Tables whose code has plain bars: GitHub needs a backslash before them, which Python-Markdown would show."""
    return re.sub(
        r"^\|.*",
        lambda row: re.sub(r"`[^`]+`", lambda code: code[0].replace(r"\|", "|"), row[0]),
        markdown,
        flags=re.MULTILINE,
    )


def notebook_page(path: Path) -> str:
    notebook = json.loads(path.read_text())
    parts = [f"*This page is a notebook: [{path.name}]({path.name}).*"]
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else _fenced("python", source))
        parts += [_shown(output) for output in cell.get("outputs", [])]
    first, title, *rest = parts
    return "\n\n".join([title, first, *rest]) + "\n"


def _shown(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        image = "".join(data["image/png"]).strip()
        return f'<img alt="Figure drawn by the cell above" src="data:image/png;base64,{image}">'
    return _fenced("text", "".join(output.get("text", data.get("text/plain", []))).rstrip("\n"))


def _fenced(language: str, text: str) -> str:
    return f"````{language}\n{text}\n````"


def normalizer_sheets() -> str:
    """A section for each built-in normalizer: what `attnorm normalizers NAME` prints."""
    from attnorm.cli.normalizers import describe, sheet
    from attnorm.normalizers.registry import BUILT_IN

    described = [describe(name, entry) for name, entry in BUILT_IN.items()]
    parts = []
    for heading, kind in (("Row normalizers", "row"), ("Mechanisms", "mechanism")):
        parts.append(f"## {heading}")
        for one in (one for one in described if one.kind == kind):
            parts += [f"### {one.name}", *(_linked(_prose(paragraph)) for paragraph in sheet(one))]
    return "\n\n".join(parts)


def claims_table() -> str:
    """All claims by family, each with a link to its proof."""
    from attnorm_lab.errata.tables import built_in_claims, claims_markdown

    return claims_markdown(built_in_claims())


def metrics_table() -> str:
    """What each metric of a head is, and how to read it."""
    from attnorm.metrics.catalogue import METRICS

    rows = [
        f"| `{one.name}` | {_cell(one.unit)} | {_cell(html.escape(one.meaning))} | {_cell(html.escape(one.reading))} |"
        for one in METRICS
    ]
    return "\n".join(["| metric | unit | meaning | how to read it |", "|---|---|---|---|", *rows])


# What is appended to a page.
GENERATED = {"normalizers.md": normalizer_sheets, "theory.md": claims_table, "reference/measuring.md": metrics_table}


def command_line() -> str:
    """All commands with their options, from the command line itself."""
    import typer

    from attnorm.cli import app

    root: Any = typer.main.get_command(app)
    introduction = (
        "`attnorm COMMAND --help` prints the same on your machine. Results are printed to stdout, progress to stderr. "
        "Exit codes: 0 success, 1 a check failed or the machine ran out of disk or memory, 2 wrong usage or input, "
        "3 unfinished work, 130 interrupted."
    )
    sections = _sections(root, root.context_class(root, info_name="attnorm"))
    return "\n\n".join(["# Command line", introduction, *sections])


def _sections(command: Any, context: Any) -> list[str]:
    if hasattr(command, "commands"):
        parts = [] if context.parent is None else [f"## {context.command_path}", _prose(command.help)]
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            parts += _sections(inner, inner.context_class(inner, parent=context, info_name=name))
        return parts
    usage = f"{context.command_path} {' '.join(command.collect_usage_pieces(context))}"
    rows = [record for record in (parameter.get_help_record(context) for parameter in command.params) if record]
    table = ["| argument or option | meaning |", "|---|---|"]
    table += [f"| `{name}` | {_cell(html.escape(meaning))} |" for name, meaning in rows]
    return [
        f"{'#' * len(context.command_path.split())} {context.command_path}",
        _prose(command.help),
        _fenced("text", usage),
        "\n".join(table) if rows else "",
        _prose(command.epilog),
    ]


def _prose(text: str | None) -> str:
    command, example = re.subn(r"^Example: ", "", text or "")
    if example:
        return _fenced("bash", command)
    return re.sub(
        r"`[^`]*`|[*_[]",
        lambda found: found[0] if found[0][0] == "`" else f"\\{found[0]}",
        html.escape(command, quote=False).strip(),
    )


def _linked(text: str) -> str:
    """Addresses and pages as links."""
    text = re.sub(r"https://[^\s)]*[^\s).,]", r"<\g<0>>", text)
    return re.sub(r"docs/([\w/-]+\.md)", r"[\g<0>](\1)", text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")


class NamedArguments(griffe.Extension):
    """Turn "name: meaning" and "name   meaning" of known arguments and fields into a list, and prompts into code."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Show `attnorm.attention` as the function that an import gives, not as the module of this name."""
        if pkg.path == "attnorm":
            for member in pkg["attention"].members.values():  # griffe does not visit what an alias hides
                if isinstance(member, griffe.Function):
                    self.on_object(obj=member)
            pkg.members["attention"] = griffe.Alias("attention", pkg["attention.attention"], parent=pkg)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None or not obj.path.startswith("attnorm."):
            return
        names = {name for name, member in obj.members.items() if isinstance(member, griffe.Attribute)}
        for function in (obj, obj.members.get("__init__")):
            if isinstance(function, griffe.Function):
                names |= {parameter.name for parameter in function.parameters}
        text = re.sub(r"(?:^>>> .*\n?(?:^\.\.\. .*\n?)*)+", _without_prompts, obj.docstring.value, flags=re.MULTILINE)
        prose, *examples = text.partition("\n```python\n")
        obj.docstring.value = _listed(prose, names) + "".join(examples)


def _without_prompts(found: re.Match[str]) -> str:
    return "\n```python\n" + re.sub(r"^(?:>>>|\.\.\.) ", "", found[0], flags=re.MULTILINE).rstrip() + "\n```\n"


def _listed(prose: str, names: set[str]) -> str:
    if not any(f"{name}:" in prose or f"{name}  " in prose for name in names):
        return prose  # a pattern takes as long as all else that is done to a docstring
    name = f"(?:{'|'.join(map(re.escape, sorted(names)))})"
    item = re.compile(rf"(?:^|(?<=[.)] ))({name}(?:, {name})*)(?::| {{2,}}) *", re.MULTILINE)
    listed = item.sub(lambda found: f"\n- `{found[1]}`: ", prose)
    return prose if listed == prose else re.sub(r"^ {4,}", "  ", listed, flags=re.MULTILINE)
