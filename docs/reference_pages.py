"""The pages of docs/reference, which git ignores: of the commands from their parsers, and of the modules of ``API``."""

import argparse
import ast
import os
import re
from collections.abc import Iterator
from typing import Any

from mlsm_plugin.cli.main import COMMANDS, build_parser

# title of a page -> modules of the package
API = {
    "Losses": "core.losses: latent_semantic token_contrastive span_contrastive cross_entropy",
    "Hugging Face": "huggingface: adaptation adaptation_settings training trainer_callback coding",
    "Collators": "huggingface: collators pretraining_sequences token_sequences",
    "Models": "huggingface: pretraining_model latent_semantic_model",
    "Encoders": "fairseq_plugin.models: latent_head_model mlsm_modern mlsm_deberta mlsm_roberta",
    "Coders": "core.sparse_coding: sparse_coder coder lasso sae_coder code_store",
    "Hidden states": "core.hidden_states: encoder sources",
    "Hub": "hub: __init__ interface infilling",
    "Evaluation": "evaluation: latent_kl minimal_pairs finetuning dictionary_quality settings",
    "Retrieval": "retrieval: phrase_datastore phrase_filling zero_shot settings",
}
MODULES = {
    title: [f"mlsm_plugin.{folder}.{name}".removesuffix(".__init__") for name in names.split()]
    for title, folder, names in ((title, *text.split(":")) for title, text in API.items())
}


def plain(text: str) -> str:
    """Text as reST; only `code` is markup."""
    parts = re.split(r"`+([^`]+)`+", text)
    parts[::2] = (re.sub(r"([\\*_|<>])", r"\\\1", part) for part in parts[::2])
    parts[1::2] = (rf"\ ``{part}``\ " for part in parts[1::2])
    return "".join(parts)


def command_page(parser: argparse.ArgumentParser, underline: str = "=") -> Iterator[str]:
    """The lines of the page of a command: usage and options, then its actions."""
    formatter: Any = parser._get_formatter()
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    yield from (parser.prog, underline * len(parser.prog), "", plain(parser.description or ""), "")
    yield from ("::", "", *(f"   {line}" for line in usage.splitlines()), "", f".. program:: {parser.prog}", "")
    yield from (("Other flags are those of ``fairseq-train``.", "") if parser.get_default("takes_extra") else ())
    below: dict[str, argparse.ArgumentParser] = {}
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        below |= next((action.choices for action in actions if isinstance(action, argparse._SubParsersAction)), {})
        options = [one for one in actions if not isinstance(one, (argparse._SubParsersAction, argparse._HelpAction))]
        yield from ((f".. rubric:: {group.title}", "") if options else ())
        for action in options:
            text = plain(formatter._expand_help(action)) if action.help else ""
            yield from (f".. option:: {formatter._format_action_invocation(action)}", "", f"   {text}", "")
    yield from (plain(parser.epilog or ""), "")
    for action_parser in below.values():
        yield from command_page(action_parser, "-")


def reference_pages() -> Iterator[tuple[str, str]]:
    """Name and text of each page of docs/reference."""
    os.environ.update(COLUMNS="90", NO_COLOR="1")
    for name in COMMANDS:
        (commands,) = [part for part in build_parser(name)._actions if isinstance(part, argparse._SubParsersAction)]
        yield f"mlsm-{name}", "\n".join(command_page(commands.choices[name]))
    for title, modules in MODULES.items():
        parts = (f"{name}\n{'-' * len(name)}\n\n.. automodule:: {name}\n" for name in modules)
        yield f"api-{title.lower().replace(' ', '-')}", "\n".join((title, "=" * len(title), "", *parts))
    link = "What the latent properties of a model mean; `the page alone <../../report.html>`_."
    frame = '.. raw:: html\n\n   <iframe src="../../report.html" title="report" class="report"></iframe>\n'
    yield "report", f"A report of mlsm inspect\n========================\n\n{link}\n\n{frame}"


def texts_of_fields(code: str, names: dict[str, Any]) -> Iterator[tuple[tuple[str, str], str]]:
    """(class, field) and what the source says of it: the comment behind it, or the help of an option.

    ``names`` are the module's, since a help may be an f-string.
    """
    lines = code.splitlines()
    for node in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ClassDef)):
        for field in (part for part in node.body if isinstance(part, ast.AnnAssign)):
            comment = re.match(r" +# (?!type:|noqa|fmt:)(.+)", lines[field.end_lineno - 1][field.end_col_offset :])
            helps = [word.value for word in getattr(field.value, "keywords", []) if word.arg == "help"]
            text = comment.group(1) if comment else eval(ast.unparse(helps[0]), names) if helps else None
            if text and isinstance(field.target, ast.Name):
                yield (node.name, field.target.id), text
