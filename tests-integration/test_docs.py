"""The site, the READMEs, the issue forms, and the commands they show."""

import json
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS / "zh").as_posix() for path in (DOCS / "zh").rglob("*.md"))
READMES = [
    ROOT / "README.md",
    ROOT / "README.zh.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "rfcs/README.md",
    *sorted(ROOT.glob("packages/*/README.md")),
]
TEXTS = [*READMES, *sorted(DOCS.rglob("*.md"))]
FORMS = {"accuracy", "bug", "feature", "performance", "question", "rfc"}
FETCHING = {"script", "link", "img", "iframe", "source", "video", "audio", "object", "embed", "track", "use", "image"}


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def split_markdown(path):
    """The text's headings as (level, title), and its fenced blocks as (language, content)."""
    headings, blocks, fence = [], [], None
    for line in path.read_text(encoding="utf-8").splitlines():
        if fence is not None:
            if line == fence[0]:
                blocks.append((fence[1], "\n".join(fence[2])))
                fence = None
            else:
                fence[2].append(line)
        elif match := re.fullmatch(r"(`{3,})(\w*)", line):
            fence = (match[1], match[2], [])
        elif match := re.fullmatch(r"(#+) (.+?)(?: \{ #[\w-]+ \})?", line):
            headings.append((len(match[1]), match[2]))
    assert fence is None, f"{name_of(path)}: a fenced block is not closed"
    return headings, blocks


class Page(HTMLParser):
    """The heading levels of a built page, and every address that a browser fetches by itself to show it."""

    def __init__(self, text):
        super().__init__()
        self.levels, self.fetched = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
        if tag in FETCHING:
            values = (attributes.get(name) for name in ("src", "href", "data", "poster", "srcset"))
            self.fetched += [value for value in values if value]
        if "url(" in (attributes.get("style") or ""):
            self.fetched += re.findall(r"url\(['\"]?([^'\")]+)", attributes["style"])


def is_outside(address):
    return re.match(r"(https?:)?//", address.strip()) is not None


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built where importing a heavy package fails."""
    blocked = tmp_path_factory.mktemp("blocked")
    for package in ("torch", "torchtitan", "matplotlib", "npu_ops", "npu_parallel", "npu_train", "npu_debug"):
        (blocked / f"{package}.py").write_text("raise RuntimeError(f'the docs build imports {__name__}')\n")
    folder = tmp_path_factory.mktemp("site")
    # The theme announces its end of life on every build; this is its own switch for that.
    environment = os.environ | {"PYTHONPATH": str(blocked), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    build = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert build.returncode == 0, build.stdout + build.stderr
    assert build.stdout + build.stderr == ""
    return folder


def test_every_page_is_built_in_both_languages(site):
    assert "index.md" in PAGES
    for page in PAGES:
        folder = "" if page == "index.md" else page.removesuffix(".md")
        zh, en = (site / language / folder / "index.html" for language in ("", "en"))
        levels = Page(zh.read_text(encoding="utf-8")).levels
        assert levels[0] == 1, page
        assert levels == Page(en.read_text(encoding="utf-8")).levels, page


def test_api_reference(site):
    for package, names in {
        "npu-ops": ["npu_ops.attention.masked_attention"],
        "npu-parallel": ["npu_parallel.layout.check", "npu_parallel.init.layout_independent_init"],
        "npu-train": ["npu_train.data.TextDataLoader", "npu_train.trainer.NpuTrainer"],
        "npu-debug": ["npu_debug.logs.summarise", "npu_debug.nonfinite.find_nonfinite"],
    }.items():
        for language in ("", "en"):
            text = (site / language / "packages" / package / "index.html").read_text(encoding="utf-8")
            missing = [name for name in names if f'id="{name}"' not in text]
            assert missing == []


def test_site_fetches_nothing_from_outside(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        fetched = Page(page.read_text(encoding="utf-8")).fetched
        assert fetched
        assert [address for address in fetched if is_outside(address)] == [], page.relative_to(site)
    for sheet in site.rglob("*.css"):
        imported = re.findall(r"(?:url\(|@import\s+)['\"]?([^'\")\s]+)", sheet.read_text(encoding="utf-8"))
        assert [address for address in imported if is_outside(address)] == [], sheet.name


def test_search_knows_both_languages(site):
    config = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))["config"]
    assert set(config["lang"]) == {"zh", "en"}
    # With two languages the theme stems the words of the index, but not those of a question.
    assert config["pipeline"] == []
    words = [word for word in re.split(config["separator"], "训练模型，checkpoint 已保存") if word]
    assert words == [*"训练模型", "checkpoint", *"已保存"]


def test_both_languages_have_the_same_pages():
    assert sorted(path.relative_to(DOCS / "en").as_posix() for path in (DOCS / "en").rglob("*.md")) == PAGES


@pytest.mark.parametrize(
    ("chinese", "english"),
    [("README.zh.md", "README.md"), *((f"docs/zh/{page}", f"docs/en/{page}") for page in PAGES)],
)
def test_translations_agree(chinese, english):
    zh_headings, zh_blocks = split_markdown(ROOT / chinese)
    en_headings, en_blocks = split_markdown(ROOT / english)
    assert [level for level, _ in zh_headings] == [level for level, _ in en_headings]
    assert zh_blocks == en_blocks
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in (chinese, english)]
    for pattern in (r"(?m)^::: .*", r"(?m)^\|.*\|$", r"\{ (#[\w-]+) \}"):
        found = [re.findall(pattern, text) for text in texts]
        # Rows of tables are translated: only their number is the same.
        assert [len(rows) for rows in found] == [len(found[0])] * 2, pattern
    assert re.search(r"[\u4e00-\u9fff]", texts[0])
    # What programs print, in the blocks, may be Chinese on an English page.
    prose = re.sub(r"(?ms)^```.*?^```", "", texts[1])
    assert len(re.findall(r"[\u4e00-\u9fff]", prose)) < 20


@pytest.mark.parametrize("path", READMES, ids=name_of)
def test_links_resolve(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        if is_outside(file):
            continue
        linked = path.parent / file if file else path
        assert linked.exists(), target
        if anchor:
            titles = [re.sub(r"[^\w\s-]", "", title).lower() for _, title in split_markdown(linked)[0]]
            assert anchor in [re.sub(r"\s", "-", title) for title in titles], target


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_make_targets_exist(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    blocks = [content for _, content in split_markdown(path)[1]]
    code = "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", path.read_text(encoding="utf-8"))])
    assert set(re.findall(r"(?m)^make ([a-z-]+)", code)) <= targets


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_no_package_index_is_named(path):
    assert re.findall(r"index[-_]url[ =]+(?!<)\S+", path.read_text(encoding="utf-8"), re.IGNORECASE) == []


def shown_commands():
    """The npu-train and npu-debug commands of all texts, with placeholders filled in."""
    lines = {
        line
        for path in TEXTS
        for language, content in split_markdown(path)[1]
        if language == "bash"
        for line in content.splitlines()
    }
    commands = [shlex.split(re.sub(r"<[^<>|]+>", "placeholder", line)) for line in sorted(lines)]
    return [command for command in commands if command and command[0] in ("npu-train", "npu-debug")]


def test_commands(ranks, tmp_path):
    """Each command is given an input that is not there, and that must be its only problem.

    The examples of what is printed for bad input are run as they are.
    """
    expected = {
        "npu-train run": f"npu-train: data file not found: {tmp_path}/absent.txt",
        "npu-train sample": "npu-train: there is no checkpoint outputs/quickstart",
        "npu-debug logs": "npu-debug: There is no file or folder outputs/quickstart",
    }
    absent = {"npu-train run": ["--data", str(tmp_path / "absent.txt")]}
    # The device is looked at first, and this machine may have no NPU.
    commands = [
        ["cpu" if word in ("npu", "sim") else word for word in command] + absent.get(" ".join(command[:2]), [])
        for command in shown_commands()
        if " ".join(command[:2]) in expected and not {"--help", "--resume"} & set(command)
    ]
    assert {" ".join(command[:2]) for command in commands} == set(expected)
    blocks = [content for language, content in split_markdown(DOCS / "en/quickstart.md")[1] if language == "console"]
    assert blocks
    examples = [shlex.split(block.splitlines()[0].removeprefix("$ ")) for block in blocks]

    answers = [ranks.command(*command, cwd=tmp_path) for command in [*commands, *examples]]
    assert {answer.returncode for answer in answers} == {2}
    for command, answer in zip(commands, answers, strict=False):
        assert answer.stdout.startswith(expected[" ".join(command[:2])]), (command, answer.stdout)
    for block, answer in zip(blocks, answers[len(commands) :], strict=True):
        assert answer.stdout.splitlines() == block.splitlines()[1:]


def test_issue_forms():
    folder = ROOT / ".gitcode/ISSUE_TEMPLATE"
    assert {path.stem for path in folder.glob("*.yml")} == FORMS


@pytest.mark.parametrize("form", sorted(FORMS))
def test_issue_form(form):
    content = yaml.safe_load((ROOT / f".gitcode/ISSUE_TEMPLATE/{form}.yml").read_text(encoding="utf-8"))
    assert set(content) == {"name", "description", "title", "labels", "body"}
    assert all(content[key] and isinstance(content[key], str) for key in ("name", "description", "title"))
    assert content["labels"]
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert sum(field["validations"]["required"] for field in fields) >= 3
    for field in fields:
        assert isinstance(field["validations"]["required"], bool)
        chinese, english = field["attributes"]["label"].split(" / ")
        assert re.search(r"[\u4e00-\u9fff]", chinese), field["id"]
        assert re.fullmatch(r"[\x20-\x7e]+", english), field["id"]
        if field["type"] == "dropdown":
            options = field["attributes"]["options"]
            assert len(set(options)) == len(options) > 1


def test_pull_request_template():
    headings, _ = split_markdown(ROOT / ".gitcode/PULL_REQUEST_TEMPLATE.md")
    assert [title.split(" / ")[1] for _, title in headings] == [
        "Motive",
        "Implementation",
        "Verification",
        "Reproducible experiment",
        "Impact on following upstream",
        "Checklist",
    ]


def test_hooks_fetch_nothing():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repository["repo"] for repository in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    assert {hook["entry"].split()[0] for hook in hooks} == {".venv/bin/ruff", ".venv/bin/lint-imports"}
