"""The folder for Neuronpedia: rows that its database takes, with the weights and tokens of the codes and the text."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.huggingface import neuronpedia_export
from mlsm_plugin.huggingface.neuronpedia_export import write_neuronpedia_export
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from tests.conftest import failing_mlsm, mlsm
from tests.hub.test_other_versions import install_version
from tests.huggingface.coded_model import LAYER, CodedModel
from tests.tiny_hf_models import make_model

Capture = pytest.CaptureFixture[str]
Row = dict[str, Any]
SET = "res-mlsm"
NUM_ATOMS = 24
TEXT, TEXTS, WHOLE, WHOLES, NUMBER, NUMBERS, YES = (
    "text",
    "text[]",
    "integer",
    "integer[]",
    "double precision",
    "double precision[]",
    "boolean",
)
# The columns of Neuronpedia's tables that a row may have; those marked "!" have no default and may not be null.
COLUMNS = {
    "SourceRelease": {
        **{"name": f"{TEXT}!", "description": f"{TEXT}!", "creatorName": f"{TEXT}!", "creatorId": f"{TEXT}!"},
        **{"visibility": TEXT, "isNewUi": YES, "featured": YES, "descriptionShort": TEXT, "urls": f"{TEXTS}!"},
        **{"creatorEmail": TEXT, "creatorNameShort": TEXT, "defaultSourceSetName": TEXT, "defaultSourceId": TEXT},
    },
    "Model": {
        **{"id": f"{TEXT}!", "displayNameShort": TEXT, "displayName": TEXT, "creatorId": f"{TEXT}!"},
        **{"tlensId": TEXT, "dimension": WHOLE, "visibility": TEXT, "defaultSourceSetName": TEXT, "instruct": YES},
        **{"layers": f"{WHOLE}!", "neuronsPerLayer": f"{WHOLE}!", "owner": f"{TEXT}!", "website": TEXT},
    },
    "SourceSet": {
        **{"modelId": f"{TEXT}!", "name": f"{TEXT}!", "description": f"{TEXT}!", "type": TEXT, "visibility": TEXT},
        **{"creatorName": f"{TEXT}!", "urls": f"{TEXTS}!", "creatorEmail": TEXT, "creatorId": f"{TEXT}!"},
        **{"releaseName": TEXT, "hasDashboards": YES, "defaultRange": WHOLE},
    },
    "Source": {
        **{"id": f"{TEXT}!", "modelId": f"{TEXT}!", "setName": f"{TEXT}!", "creatorId": f"{TEXT}!", "dataset": TEXT},
        **{"hasDashboards": YES, "visibility": TEXT, "num_prompts": WHOLE, "num_tokens_in_prompt": WHOLE},
        **{"notes": TEXT, "hfRepoId": TEXT, "hfFolderId": TEXT},
    },
    "Neuron": {
        **{"modelId": f"{TEXT}!", "layer": f"{TEXT}!", "index": f"{TEXT}!", "sourceSetName": TEXT, "creatorId": TEXT},
        **{"maxActApprox": NUMBER, "frac_nonzero": NUMBER, "pos_str": TEXTS, "neg_str": TEXTS},
        **dict.fromkeys(("pos_values", "neg_values"), NUMBERS),
        **dict.fromkeys(("freq_hist_data_bar_heights", "freq_hist_data_bar_values"), NUMBERS),
    },
    "Activation": {
        **{"id": f"{TEXT}!", "tokens": f"{TEXTS}!", "index": f"{TEXT}!", "layer": f"{TEXT}!", "modelId": f"{TEXT}!"},
        **{"maxValue": f"{NUMBER}!", "maxValueTokenIndex": f"{WHOLE}!", "minValue": f"{NUMBER}!"},
        **{"values": f"{NUMBERS}!", "creatorId": f"{TEXT}!", "qualifyingTokenIndex": WHOLE},
        **{"binMin": NUMBER, "binMax": NUMBER, "binContains": NUMBER},
    },
}
# the keys of these tables, and those of other tables that must exist
KEYS = {
    "SourceRelease": ['PRIMARY KEY ("name")'],
    "Model": ['PRIMARY KEY ("id")'],
    "SourceSet": [
        'PRIMARY KEY ("modelId", "name")',
        'FOREIGN KEY ("modelId") REFERENCES "Model" ("id")',
        'FOREIGN KEY ("releaseName") REFERENCES "SourceRelease" ("name")',
    ],
    "Source": [
        'PRIMARY KEY ("modelId", "id")',
        'FOREIGN KEY ("modelId", "setName") REFERENCES "SourceSet" ("modelId", "name")',
    ],
    "Neuron": [
        'PRIMARY KEY ("modelId", "layer", "index")',
        'FOREIGN KEY ("modelId", "layer") REFERENCES "Source" ("modelId", "id")',
        'FOREIGN KEY ("modelId", "sourceSetName") REFERENCES "SourceSet" ("modelId", "name")',
    ],
    "Activation": [
        'PRIMARY KEY ("id")',
        'FOREIGN KEY ("modelId", "layer", "index") REFERENCES "Neuron" ("modelId", "layer", "index")',
    ],
}
PYTHON_TYPES = {TEXT: (str,), WHOLE: (int,), NUMBER: (int, float), YES: (bool,)}
FILES = {
    "release.jsonl": "SourceRelease",
    "model.jsonl": "Model",
    "sourceset.jsonl": "SourceSet",
    "source.jsonl": "Source",
    "features/*": "Neuron",
    "activations/*": "Activation",
}
READER = """
import gzip, json, sys
from pathlib import Path
from neuronpedia.np_activation import Activation

number = 0
for path in sorted(Path(sys.argv[1], "activations").iterdir()):
    for line in gzip.open(path, "rt", encoding="utf-8"):
        row = json.loads(line)
        if row["binMin"] == -1:  # of the strongest; the API answers without these bounds
            row.update(binMin=None, binMax=None, binContains=None)
        activation = Activation.from_np_db_json({**row, "source": row["layer"]})
        assert max(activation.values) == row["maxValue"] and str(activation.index) == row["index"]
        number += 1
print(number)
"""


@pytest.fixture(scope="module")
def folder(coded: CodedModel, codes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("neuronpedia")
    export = write_neuronpedia_export(codes, coded.tokens, f"hf:{coded.model}", output, SET)
    assert export.folder == output / "bert" / f"{LAYER}-{SET}"
    assert (export.features, export.examples) == (NUM_ATOMS, len(rows_of(export.folder, "activations/*")))
    return export.folder


def rows_of(folder: Path, pattern: str) -> list[Row]:
    rows = []
    for path in sorted(folder.glob(pattern)):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        rows += [json.loads(line) for line in content.decode().splitlines()]
    return rows


def has_type(value: object, kind: str) -> bool:
    if kind.endswith("[]"):
        return isinstance(value, list) and all(has_type(item, kind[:-2]) for item in value)
    return type(value) in PYTHON_TYPES[kind]


def check_rows(rows: list[Row], columns: dict[str, str]) -> None:
    """Check what an insertion of these rows into a table of Neuronpedia's database needs."""
    for row in rows:
        assert row.keys() == rows[0].keys()  # the importer takes the columns of the first row
        assert row.keys() <= columns.keys()
        assert {name for name, kind in columns.items() if kind.endswith("!")} <= row.keys()
        for name, value in row.items():
            assert has_type(value, columns[name].rstrip("!")), (name, value)


def test_the_database_takes_every_row(folder: Path) -> None:
    rows = {table: rows_of(folder, pattern) for pattern, table in FILES.items()}
    for table, columns in COLUMNS.items():
        check_rows(rows[table], columns)
    release, model, source_set, source = (rows[name] for name in ("SourceRelease", "Model", "SourceSet", "Source"))
    assert len(release) == len(model) == len(source_set) == len(source) == 1
    assert source_set[0]["releaseName"] == release[0]["name"]
    assert source[0]["setName"] == source_set[0]["name"] == SET
    assert (source[0]["modelId"], source[0]["id"]) == (model[0]["id"], f"{LAYER}-{SET}") == ("bert", folder.name)
    assert (model[0]["layers"], model[0]["dimension"]) == (3, 32)
    for row in [*rows["Neuron"], *rows["Activation"]]:
        assert (row["modelId"], row["layer"]) == (model[0]["id"], source[0]["id"])
    assert [row["index"] for row in rows["Neuron"]] == [str(atom) for atom in range(NUM_ATOMS)]
    assert len({row["id"] for row in rows["Activation"]}) == len(rows["Activation"])


def test_features_have_the_figures_of_the_codes(folder: Path, codes: Path) -> None:
    store = CodeStore(codes)
    dense = store.rows(0, len(store)).toarray()
    for atom, row in enumerate(rows_of(folder, "features/*")):
        values = dense[:, atom][dense[:, atom] > 0]
        assert row["maxActApprox"] == pytest.approx(values.max(initial=0), abs=1e-5)
        assert row["frac_nonzero"] == pytest.approx(len(values) / store.meta["coded_tokens"])
        heights = row["freq_hist_data_bar_heights"]
        middles = row["freq_hist_data_bar_values"]
        assert sum(heights) == len(values)
        assert len(heights) == len(middles)
        if len(values):
            mean = np.average(middles, weights=heights)
            assert abs(mean - values.mean()) <= row["maxActApprox"] / 100 + 1e-5  # half a bar


def test_examples_have_the_tokens_and_weights_of_the_text(folder: Path, codes: Path, coded: CodedModel) -> None:
    store = CodeStore(codes)
    dense = store.rows(0, len(store)).toarray()
    text = TokenSequences(coded.tokens)
    tokenizer = HuggingFaceTokenizer(coded.model)
    sequences = {}
    for number in range(len(text)):
        tokens = [tokenizer.text_of_id(token) for token in text[number].tolist()]
        sequences.setdefault(tuple(tokens), []).append(number)
    seen: dict[str, list[Row]] = {}
    for row in rows_of(folder, "activations/*"):
        weights = [dense[text.starts[number] : text.starts[number + 1]] for number in sequences[tuple(row["tokens"])]]
        expected = [np.round(part[:, int(row["index"])].astype(np.float64), 5).tolist() for part in weights]
        assert row["values"] in expected
        assert row["maxValue"] == max(row["values"]) == row["values"][row["maxValueTokenIndex"]] > 0
        assert row["minValue"] == min(row["values"])
        seen.setdefault(row["index"], []).append(row)
    features = rows_of(folder, "features/*")
    for index, rows in seen.items():
        strongest = [row for row in rows if row["binMin"] == -1]
        drawn = rows[len(strongest) :]
        assert rows[: len(strongest)] == strongest
        assert all(row["binContains"] == -1 for row in strongest)
        assert [row["maxValue"] for row in strongest] == sorted((row["maxValue"] for row in rows), reverse=True)[:20]
        assert strongest[0]["maxValue"] == features[int(index)]["maxActApprox"] == strongest[0]["binMax"]
        for row in drawn:
            assert row["binMin"] - 2e-5 <= row["maxValue"] <= row["binMax"] + 2e-5
            assert 0 < row["binContains"] <= 1
    assert any(row["binMin"] != -1 for rows in seen.values() for row in rows)


def test_tokens_read_as_text(folder: Path) -> None:
    joined = {"".join(row["tokens"]) for row in rows_of(folder, "activations/*")}
    assert all(text.strip().startswith("[CLS]") and text.endswith("[SEP]") for text in joined)
    assert not any("##" in text or "  " in text for text in joined)


def test_files_have_1024_features_and_none_is_empty(
    coded: CodedModel, codes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(neuronpedia_export, "FEATURES_OF_FILE", 1)
    by_atom = write_neuronpedia_export(codes, coded.tokens, coded.model, tmp_path, SET).folder
    features = {json.loads(gzip.decompress(path.read_bytes()))["index"] for path in by_atom.glob("features/*")}
    assert features == {str(atom) for atom in range(NUM_ATOMS)}
    dead = {row["index"] for row in rows_of(folder, "features/*") if not row["maxActApprox"]}
    with_examples = {path.name for path in by_atom.glob("activations/*")}
    assert with_examples == {f"batch-{atom}.jsonl.gz" for atom in range(NUM_ATOMS) if str(atom) not in dead}
    one_file = [json.dumps(row) for row in rows_of(folder, "activations/*")]
    assert sorted(map(json.dumps, rows_of(by_atom, "activations/*"))) == sorted(one_file)


def test_the_command_writes_the_same_bytes_again_and_leaves_nothing_stale(
    coded: CodedModel, codes: Path, tmp_path: Path, capsys: Capture, folder: Path
) -> None:
    words = ("convert", codes, tmp_path, "--sequences", coded.tokens, "--auxiliary", f"hf:{coded.model}")
    words = (*words, "--neuronpedia", SET)
    mlsm(*words)
    output = tmp_path / "bert" / folder.name
    assert f"{output}: {NUM_ATOMS} features with " in capsys.readouterr().out
    expected = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.gz")}
    assert {path.relative_to(output): path.read_bytes() for path in output.rglob("*.gz")} == expected
    assert "exists already; name another output, or pass --overwrite" in failing_mlsm(capsys, *words)
    for name in ("features/batch-7.jsonl.gz", "activations/batch-7.jsonl.gz", "notes.txt"):
        (output / name).write_bytes(b"old")
    mlsm(*words, "--overwrite")
    assert {path.relative_to(output): path.read_bytes() for path in output.rglob("*.gz")} == expected
    assert (output / "notes.txt").read_bytes() == b"old"
    (output / "explanations").mkdir()
    line = failing_mlsm(capsys, *words, "--overwrite")
    assert "explanations belongs to the features that would be replaced; move it away first" in line


def test_what_cannot_be_exported_is_one_line(coded: CodedModel, codes: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out"
    words = ("convert", codes, output, "--neuronpedia")
    text = ("--sequences", coded.tokens)
    model = ("--auxiliary", f"hf:{coded.model}")
    assert "--sequences and --auxiliary are required" in failing_mlsm(capsys, *words, SET)
    for name in ("../up", "Upper", "", "a" * 65, "with space", "-x", "réseau"):
        line = failing_mlsm(capsys, "convert", codes, output, f"--neuronpedia={name}", *text, *model)
        assert "--neuronpedia takes the name of a set, such as res-mlsm" in line
    other = make_model("bert", coded.text, tmp_path / "other", num_hidden_layers=2)
    assert "codes are of another model" in failing_mlsm(capsys, *words, SET, *text, "--auxiliary", f"hf:{other}")
    TokenSequences.write(tmp_path / "text", [[1, 2, 3], [1, 4, 3]])
    assert "another text" in failing_mlsm(capsys, *words, SET, "--sequences", tmp_path / "text", *model)
    unnamed = tmp_path / "模型"
    shutil.copytree(coded.model, unnamed)
    line = failing_mlsm(capsys, *words, SET, *text, "--auxiliary", f"hf:{unnamed}")
    assert "Neuronpedia names models with a-z, 0-9, - and _" in line
    layerless = tmp_path / "layerless"
    shutil.copytree(codes, layerless)
    meta = json.loads((layerless / "meta.json").read_text())
    del meta["layer"]
    (layerless / "meta.json").write_text(json.dumps(meta))
    line = failing_mlsm(capsys, "convert", layerless, output, "--neuronpedia", SET, *text, *model)
    assert "the codes do not record their layer" in line
    line = failing_mlsm(capsys, "convert", coded.dictionary, output, "--neuronpedia", SET)
    assert "--neuronpedia is not for a dictionary of this package" in line
    assert not output.exists()


def test_a_failure_leaves_the_old_export(
    coded: CodedModel, codes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (codes, coded.tokens, coded.model, tmp_path, SET)
    output = write_neuronpedia_export(*arguments).folder
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}

    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(neuronpedia_export, "_write_batches", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_neuronpedia_export(*arguments, overwrite=True)
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    assert [path.name for path in output.parent.iterdir()] == [output.name]


@pytest.mark.slow
def test_neuronpedias_package_reads_the_examples(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    needed = ("python-dotenv", "requests", "urllib3", "idna", "certifi", "charset_normalizer")
    library = install_version(None, tmp_path_factory, more=("neuronpedia==1.2.1", *needed))
    environment = {**os.environ, "PYTHONPATH": str(library)}
    command = [sys.executable, "-c", READER, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) == len(rows_of(folder, "activations/*"))


def statements(folder: Path) -> list[str]:
    """SQL that makes Neuronpedia's tables and inserts all rows as its importer does; a statement has no line break."""
    lines = []
    for table, columns in COLUMNS.items():
        parts = [f'"{name}" {kind.replace("!", " NOT NULL")}' for name, kind in columns.items()]
        lines.append(f'CREATE TABLE "{table}" ({", ".join([*parts, *KEYS[table]])})')
    for pattern, table in FILES.items():
        rows = rows_of(folder, pattern)
        names = ", ".join(f'"{name}"' for name in rows[0])
        types = ", ".join(f'"{name}" {COLUMNS[table][name].rstrip("!")}' for name in rows[0])
        content = json.dumps(rows).replace("'", "''")
        source = f"jsonb_to_recordset('{content}'::jsonb) AS rows({types})"
        lines.append(f'INSERT INTO "{table}" ({names}) SELECT {names} FROM {source}')
    lines.append('SELECT count(*) AS features FROM "Neuron"')
    lines.append('SELECT count(*) AS examples FROM "Activation" WHERE cardinality("tokens") = cardinality("values")')
    return lines


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("initdb") is None, reason="PostgreSQL is not installed")
def test_postgresql_takes_every_row(folder: Path) -> None:
    as_user = []
    with tempfile.TemporaryDirectory() as root:
        data = Path(root, "data")
        data.mkdir()
        if os.getuid() == 0:  # it does not run as root
            as_user = ["runuser", "-u", "postgres", "--"]
            shutil.chown(root, "postgres")
            shutil.chown(data, "postgres")
        initdb = [*as_user, "initdb", "--no-sync", "--encoding=UTF8", "--locale=C.UTF-8", "-D", str(data)]
        subprocess.run(initdb, check=True, capture_output=True, cwd=root, timeout=120)
        command = [*as_user, "postgres", "--single", "-D", str(data), "postgres"]
        sql = "\n".join(statements(folder)) + "\n"
        done = subprocess.run(command, input=sql, capture_output=True, text=True, cwd=root, timeout=120, check=True)
    assert "ERROR" not in done.stderr, done.stderr[:2000]
    assert f'features = "{NUM_ATOMS}"' in done.stdout
    assert f'examples = "{len(rows_of(folder, "activations/*"))}"' in done.stdout
