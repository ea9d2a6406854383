"""The recipes of CONTRIBUTING.md, followed to the letter: its files are written and its commands run, nothing else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.coder import coder_kinds
from tests.conftest import REPOSITORY, Pipeline
from tests.documented import run_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_python_in_module")]

PAGE = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")


def recipe(title: str) -> str:
    """The section of a recipe."""
    (section,) = re.findall(rf"## Recipe: {title}\n(.*?)(?=\n## |\Z)", PAGE, flags=re.S)
    return section


def write_files(folder: Path) -> None:
    """Every Python block of the page under the name in its first line."""
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        name, code = block.split("\n", 1)
        path = folder / name.removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, encoding="utf-8")


def commands(title: str) -> str:
    return "\n".join(re.findall(r"```bash\n(.*?)```", recipe(title), flags=re.S))


@pytest.fixture(scope="module")
def folder(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with what the page calls ``data-bin``, ``aux`` and ``dict``, and the plugin."""
    root = tmp_path_factory.mktemp("plugin-of-a-user")
    shutil.copytree(pipeline.data_bin, root / "data-bin", ignore=shutil.ignore_patterns("*.codes"))
    shutil.copytree(pipeline.dictionary, root / "dict")
    (root / "aux").mkdir()
    shutil.copy(pipeline.auxiliary, root / "aux" / "checkpoint_best.pt")
    (root / "mlsm_plugin").symlink_to(REPOSITORY / "mlsm_plugin")
    write_files(root)
    assert {path.name for path in (root / "my_plugin").iterdir()} == {
        *("__init__.py", "nearest_atoms.py", "word_vectors.py", "confident_mlm.py")
    }
    return root


def test_a_coder_is_one_file(folder: Path) -> None:
    printed = run_in(folder, commands("a sparse coder"))
    store = CodeStore(folder / "data-bin" / "train.codes")
    assert (store.meta["coder"], store.meta["nearest"]) == ("nearest", 3)
    assert "lambda" not in store.meta
    assert not [name for name in store.meta if name.startswith("gap")]
    codes = store.rows(0, store.num_tokens)
    assert store.meta["coded_tokens"] > 10_000
    assert codes.getnnz(axis=1).max() == 3
    np.testing.assert_allclose(codes.sum(axis=1)[codes.getnnz(axis=1) > 0], 1, atol=2e-3)
    assert "duality gap" not in printed
    assert "--user-dir my_plugin" in printed  # the next command knows of the plugin
    run_in(folder, "mlsm inspect data-bin --output report.html --user-dir my_plugin")
    assert "nearest" in (folder / "report.html").read_text(encoding="utf-8")
    flags = "--arch mlsm_roberta_tiny --encoder-embed-dim 32 --tokens-per-sample 64 --optimizer adam --lr 1e-3"
    training = "--task masked_latent_semantic --criterion latent_semantic_kl --batch-size 8 --max-update 2 --no-save"
    assert "kl=" in run_in(
        folder, f"fairseq-train data-bin --user-dir my_plugin {training} {flags} --log-interval 1 2>&1"
    )


def test_an_option_of_another_kind_is_refused_in_one_line(folder: Path) -> None:
    words = "mlsm encode data-bin --auxiliary aux/checkpoint_best.pt --dictionary dict --nearest 3 --user-dir my_plugin"
    printed = run_in(folder, f"! {words} 2>&1")
    assert re.search(r"^mlsm: error: dict holds a coder of kind 'lasso', which has no option --nearest$", printed, re.M)


def test_a_kind_without_its_plugin_is_named(folder: Path) -> None:
    if not (folder / "nearest").exists():
        run_in(folder, "python make_nearest.py")
    printed = run_in(folder, "! mlsm encode data-bin --auxiliary aux/checkpoint_best.pt --dictionary nearest 2>&1")
    assert "a coder of the unknown kind 'nearest'; known kinds are lasso, sae" in printed
    assert "--user-dir" in printed
    assert "nearest" not in coder_kinds()  # of this process, which never imported the plugin


def test_a_source_is_one_file(folder: Path) -> None:
    run_in(folder, commands("a source of hidden states"))
    meta = json.loads((folder / "vector-dict" / "meta.json").read_text(encoding="utf-8"))
    assert (meta["n_atoms"], meta["dim"], meta["layer"]) == (24, 32, 0)
    printed = run_in(folder, "! mlsm dictionary data-bin --auxiliary vectors:vectors.npy --layer 0 --output other 2>&1")
    assert "the prefix vectors: is not known (known: hf:" in printed


def test_an_objective_is_a_loss_a_criterion_and_perhaps_a_task(folder: Path) -> None:
    printed = run_in(folder, commands("an objective").rstrip() + " --log-format simple --log-interval 1 2>&1")
    losses = [float(value) for value in re.findall(r"\| train_inner \|.*?\bloss=([\d.]+)", printed)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert (folder / "confident" / "checkpoint_best.pt").exists()
