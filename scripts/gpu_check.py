#!/usr/bin/env python3
"""Run every objective, precision and command once on the available device; takes five minutes on one GPU.

    python scripts/gpu_check.py --output checked [--only mlm-fp16 encode-topk] [--list]

When a step ends, a line is printed: its name, its seconds, its most important figure, and ok or the last line of its
error. If a step fails, only the steps that need it are skipped. At the end, a table is printed, and ``gpu_check.json``
and ``gpu_check.log`` are written; the log has the whole output of all steps. Independent steps run in parallel; with
``--jobs 1``, nothing else uses the device while a figure is measured. On a CPU, the sizes are too small to say anything
about speed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
PROGRAMS = {"mlsm": ["-m", "mlsm_plugin.cli.main"], "train": ["-m", "fairseq_cli.train"], "python": []}
SPEED = r"\| train \|.* \| loss [\d.]+ .*\| wps (\d+)"  # the last pass of a training whose loss is a number
CODED = r"train: \d+ tokens coded in .* \((\d+) a second\)"
BETTER = r"held-out (?:\w+_)?(?:loss|kl): [\d.]+ before, ([\d.]+) after"
# the sizes of the steps, by their names in the commands below
SIZES = {
    "cuda": {
        "megabytes": 1.5, "pieces": 4000, "updates": 200, "save": 100, "batch": 64, "length": 128, "atoms": 1000,
        "states": 100_000, "batches": 200, "slow": 0.02, "adapted": 40, "arch": "mlsm_modern_small",
        "narrow": "--encoder-layers 4 --encoder-embed-dim 512 --encoder-attention-heads 8",
    },
    "cpu": {
        "megabytes": 0.05, "pieces": 400, "updates": 6, "save": 3, "batch": 4, "length": 32, "atoms": 40,
        "states": 1000, "batches": 3, "slow": 0.02, "adapted": 2, "arch": "mlsm_modern_tiny",
        "narrow": "--encoder-layers 1 --encoder-embed-dim 64 --encoder-attention-heads 1",
    },
}  # fmt: skip
# parts of commands that several steps share
PARTS = {
    "model": "--arch {arch} {narrow} --max-positions {length} --sample-break-mode complete",
    "fit": "{cpu} --user-dir {plugin} --tokens-per-sample {length} --batch-size {batch} "
    "--required-batch-size-multiple 1 --lr 1e-3 --lr-scheduler fixed --clip-norm 1 --max-update {updates} "
    "--save-interval-updates {save} --keep-interval-updates 1 --no-epoch-checkpoints --log-format simple "
    "--log-interval 20 --num-workers 0",
    "bf16": "--optimizer fused_adamw --autocast bf16",
    "fp16": "--optimizer adam --fp16",
    "mlm": "train data {model} {fit} --task plain_masked_lm --criterion masked_lm",
    "mlsm": "train data {model} {fit} --task masked_latent_semantic --criterion latent_semantic_kl --mlm-weight 1",
    "taco": "train data {model} {fit} --task taco --criterion token_contrastive",
    "regression": "train data {model} {fit} --task state_regression --criterion state_regression "
    "--auxiliary-checkpoint mlm-bf16/checkpoint_last.pt --auxiliary-layer 1",
    "vectors": "train data {model} {fit} --task sentence_vectors --criterion sentence_vectors --encoder-embed-dim 32 "
    "--encoder-attention-heads 1 --auxiliary-checkpoint mlm-bf16/checkpoint_last.pt",
    "npm": "train data {model} {fit} --task nonparametric_masked_lm --criterion span_contrastive --group-size 16 "
    "--batch-size 4 --finetune-from-model mlm-bf16/checkpoint_last.pt",
    "denoising": "train data --arch denoising_small {narrow} {fit} --task span_denoising --criterion cross_entropy",
    "teacher": "data --auxiliary mlm-bf16/checkpoint_last.pt --tokens-per-sample {length} {on}",
    "learn": "mlsm dictionary {teacher} --layer 1 --atoms {atoms} --tokens {states}",
    "lasso": "--lambda 0.1 --iterations {batches}",
    "online": "--latent-source online --auxiliary-checkpoint mlm-bf16/checkpoint_last.pt --latent-dictionary",
    "adapt": "mlsm adapt hf --text train.txt --max-length {length} --updates {adapted} --evaluate-every {adapted} "
    "--batch-size 8 {cpu}",
    "finetune": "mlsm finetune --model mlm-bf16 --train train.tsv --valid valid.tsv --max-epoch 2",
    "lines": "--text valid.txt --lines 50",
    "codes": "--atoms {atoms} --tokens {states} --k 8",
    "fill": '"It returns the <mask> of the array."',
}


@dataclass(frozen=True)
class Step:
    """A command, and how to read its output.

    Attributes:
        name: of the step, and of the folder that it writes, if it writes one.
        needs: steps that must have succeeded.
        command: its words; names in braces are parts and sizes.
        figure: regular expression for the figure in the output; without a match, the step has failed.
        unit: of the figure.
        gpu: whether it needs a GPU.
        kill_at: kill the process as soon as this file exists, and start it again.
        copies: number of parallel processes; ``{copy}`` is the index of each.
        refusal: regular expression for an error that a process may have if another process succeeds.
        seconds: time limit on a GPU; four times as long on a CPU.
    """

    name: str
    needs: str
    command: str
    figure: str = ""
    unit: str = ""
    gpu: bool = False
    kill_at: str = ""
    copies: int = 1
    refusal: str = ""
    seconds: int = 100


TOKENS = "tokens/s"
STEPS = [
    Step("text", "", "python {scripts}/collect_corpus.py --output . --max-megabytes {megabytes}"),
    Step("labelled", "text", ""),  # this program writes it
    Step("tokenizer", "text", "mlsm tokenizer --input train.txt --vocab-size {pieces} --output tokenizer"),
    Step("data", "tokenizer", "mlsm binarize --tokenizer tokenizer --train train.txt --valid valid.txt --output data "
         "--workers 1 --max-unk-rate 0.5", r"train .*?([\d,]+) +[\d.]+%", "tokens"),
    *(
        Step(f"{task}-{precision}", "data mlm-bf16" if task in ("npm", "regression", "vectors") else "data",
             f"{{{task}}} {{{precision}}} --save-dir {task}-{precision}", SPEED, TOKENS, precision == "fp16")
        for task in ("mlm", "taco", "npm", "denoising", "regression", "vectors") for precision in ("bf16", "fp16")
    ),
    Step("mlm-deberta", "data", "{mlm} {bf16} --arch mlsm_deberta_tiny --save-dir mlm-deberta", SPEED, TOKENS),
    Step("mlm-compiled", "data", "{mlm} {bf16} --compile on --save-dir mlm-compiled", SPEED, TOKENS, True, seconds=200),
    Step("dictionary", "mlm-bf16", "{learn} {lasso} --output dictionary",
         r"learned in ([\d.]+) s", "s"),
    Step("dictionary-spams", "mlm-bf16", "{learn} {lasso} --backend spams --output dictionary-spams",
         r"learned in ([\d.]+) s", "s"),
    Step("sae", "mlm-bf16", "{learn} --coder topk --k 8 --output sae", r"learned in ([\d.]+) s", "s"),
    Step("encode-active_set", "dictionary", "mlsm encode {teacher} --dictionary dictionary", CODED, TOKENS),
    Step("encode-spams", "dictionary", "mlsm encode {teacher} --dictionary dictionary --solver spams --output spams "
         "--coverage {slow}", CODED, TOKENS),
    Step("encode-sae", "sae", "mlsm encode {teacher} --dictionary sae --output codes --fp16", CODED, TOKENS),
    Step("encode-two", "sae", "mlsm encode {teacher} --dictionary sae --output two --shard-tokens 4096 "
         "--num-processes 2 --process-index {copy}", r"two/train.codes: (\d+) tokens", "tokens", copies=2),
    Step("mlsm-stored-bf16", "encode-active_set", "{mlsm} {bf16} --save-dir mlsm-stored-bf16", SPEED, TOKENS),
    Step("mlsm-stored-fp16", "encode-active_set", "{mlsm} {fp16} --save-dir mlsm-stored-fp16", SPEED, TOKENS, True),
    Step("mlsm-sae-bf16", "encode-sae", "{mlsm} {bf16} --latent-codes codes --save-dir mlsm-sae-bf16", SPEED, TOKENS),
    Step("mlsm-online-bf16", "dictionary", "{mlsm} {bf16} {online} dictionary --save-dir mlsm-online-bf16",
         SPEED, TOKENS),
    Step("mlsm-online-sae-bf16", "sae", "{mlsm} {bf16} {online} sae --auxiliary-fp16 --save-dir mlsm-online-sae-bf16",
         SPEED, TOKENS),
    Step("mlsm-online-fp16", "dictionary", "{mlsm} {fp16} {online} dictionary --save-dir mlsm-online-fp16",
         SPEED, TOKENS, True),
    Step("resume", "data", "{mlm} {bf16} --save-dir resume", r"Loaded checkpoint .* @ (\d+) updates", "updates",
         kill_at="resume/checkpoint_last.pt"),
    Step("one-folder", "data", "{mlm} {bf16} --save-dir one-folder", SPEED, TOKENS, copies=2,
         refusal="another process is writing to"),
    Step("two-ranks", "data", "{mlm} {bf16} --save-dir two-ranks --distributed-world-size 2 --distributed-rank {copy} "
         "--distributed-init-method file://{folder}/ranks --distributed-no-spawn {ranks}", SPEED, TOKENS, copies=2,
         refusal="Duplicate GPU|NCCL|invalid device"),
    Step("preprocess", "text", "mlsm preprocess --train train.txt --valid valid.txt --output chain --vocab-size "
         "{pieces} --auxiliary-arch {arch} {narrow} --auxiliary-updates {updates} --batch-size {batch} --keep-at 100 "
         "--tokens-per-sample {length} --atoms {atoms} --tokens {states} --iterations {batches} --coverage 0.2 {cpu} "
         "{on}", CODED, TOKENS, seconds=200),
    Step("pretrain", "data", "mlsm pretrain data --save-dir pretrain --arch {arch} {narrow} --max-update {updates} "
         "--stages 50 {codes} --tokens-per-sample {length} --batch-size {batch} {cpu} {on}", SPEED, TOKENS),
    Step("babylm", "text", "mlsm babylm train . --track custom --words 5M --epochs 1 --arch {arch} {narrow} "
         "--vocab-size {pieces} --tokens-per-sample {length} --batch-size {batch} --output babylm {cpu} {on}", SPEED,
         TOKENS),
    Step("evaluate-dictionary", "dictionary", "mlsm evaluate dictionary dictionary {teacher}", r"loss\D*([\d.]+)"),
    Step("inspect", "encode-active_set", "mlsm inspect data --output report.html", r"(\d+) atoms", "atoms"),
    Step("datastore", "npm-bf16", "mlsm npm datastore data --checkpoint npm-bf16/checkpoint_last.pt "
         "--output datastore --tokens-per-sample {length} {on}"),
    Step("fill", "datastore", "mlsm npm fill --checkpoint npm-bf16 --datastore datastore {fill} {on}", r"mask (1)"),
    Step("classify", "datastore labelled", "mlsm npm classify --checkpoint npm-bf16 --datastore datastore --input "
         'valid.tsv --template "{} It is <mask>." --verbalizer words.tsv {on}', r"accuracy ([\d.]+)"),
    Step("finetune", "mlm-bf16 labelled", "{finetune} --output finetune {cpu}", r"mean +([\d.]+)", "accuracy"),
    Step("finetune-bf16", "mlm-bf16 labelled", "{finetune} --output finetune-bf16 --bf16 on", r"mean +([\d.]+)",
         "accuracy", True),
    Step("evaluate-pairs", "mlm-bf16 labelled", "mlsm evaluate pairs --checkpoint mlm-bf16 --input pairs.jsonl {on}",
         r"accuracy ([\d.]+)", "accuracy"),
    Step("infill", "denoising-bf16", 'mlsm infill --checkpoint denoising-bf16 "It <extra_id_0> the array." {on}',
         r"<extra_id_0> +(\S+)"),
    Step("hub", "mlm-bf16", 'python -c "from mlsm_plugin.hub import from_pretrained\n'
         "model = from_pretrained('mlm-bf16').to('{device}')\n"
         "print('filled', len(model.fill_mask('It is the <mask>.', topk=3)))\"", r"filled (\d+)", "words"),
    Step("hf", "mlm-bf16", "mlsm convert mlm-bf16 hf {lines}", r"at most ([\d.e+-]+)", "of logits"),
    Step("import", "hf", "mlsm convert hf imported {lines}", r"at most ([\d.e+-]+)", "of logits"),
    Step("binarize-sequences", "hf", "mlsm binarize --format sequences --train train.txt --tokenizer hf:hf "
         "--max-length {length} --output ids", r"sequences, ([\d,]+) tokens", "tokens"),
    *(
        Step(f"adapt-{objective}", "hf", f"{{adapt}} --objective {objective} --output adapt-{objective} {more}", BETTER)
        for objective, more in (("mlm", ""), ("mlsm", "{codes}"), ("mlsm+mlm", "{codes}"), ("regression+mlm", ""),
                                ("taco", ""), ("npm", ""))
    ),
    Step("search-index", "adapt-mlsm", "mlsm search index valid.txt --model adapt-mlsm/model --output index {on}"),
    Step("search-query", "search-index", 'mlsm search query index "It returns the array" {on}'),
]  # fmt: skip


def words_of(step: Step, names: dict[str, object], copy: int) -> list[str]:
    """The command of a step; names in braces are replaced until none is left."""
    command = step.command
    before = ""
    names = {**names, **PARTS, "copy": copy}
    while command != before:
        before = command
        command = re.sub(r"\{(\w+)\}", lambda match: str(names[match[1]]), command)
    program, *words = shlex.split(command)
    return [sys.executable, *PROGRAMS[program], *words]


def write_labelled(folder: Path) -> None:
    """Write labelled texts, pairs and label words: sentences, and the same sentences with their words reordered."""
    for split in ("train", "valid"):
        lines = [line for line in (folder / f"{split}.txt").read_text(encoding="utf-8").splitlines() if line][:400]
        mixed = [" ".join(sorted(line.split())) for line in lines]
        rows = [f"good\t{line}\nbad\t{other}\n" for line, other in zip(lines, mixed, strict=True)]
        (folder / f"{split}.tsv").write_text("".join(rows), encoding="utf-8")
    short = [line for line in lines if len(line.split()) < 9]
    pairs = [{"sentence_good": line, "sentence_bad": " ".join(reversed(line.split()))} for line in short]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    (folder / "words.tsv").write_text("good\tthe\nbad\tnot\n", encoding="utf-8")


@dataclass
class Result:
    """How a step ended: ``ok``, ``failed`` or ``skipped``, with its figure, or the last line of its error."""

    name: str
    state: str
    seconds: float = 0.0
    figure: str = ""
    unit: str = ""
    error: str = ""
    output: str = ""

    def __str__(self) -> str:
        outcome = self.error if self.state != "ok" else f"{self.figure} {self.unit}"
        return f"{self.name:22}{self.seconds:7.1f} s  {self.state:8}{outcome}"


class Check:
    """Runs steps in a folder."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        on_cpu = device == "cpu"
        self.slowness = 4 if on_cpu else 1
        self.names: dict[str, object] = {
            **SIZES["cpu" if on_cpu else "cuda"], "device": device, "folder": folder, "scripts": REPOSITORY / "scripts",
            "plugin": REPOSITORY / "mlsm_plugin", "cpu": "--cpu" if on_cpu else "", "on": f"--device {device}",
            "ranks": "--distributed-backend gloo --ddp-backend legacy_ddp" if on_cpu else "",
        }  # fmt: skip
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = os.environ.get("OMP_NUM_THREADS", "2")
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": threads}

    def run(self, step: Step) -> Result:
        """Run a step; never raises an exception."""
        start = time.monotonic()
        try:
            state, figure, output = self._run(step, start + step.seconds * self.slowness)
        except Exception as error:  # an error of this program itself
            state = "failed"
            figure = ""
            output = f"{type(error).__name__}: {error}"
        lines = [line for line in output.splitlines() if line.strip()] or [""]
        error = "" if state == "ok" else " ".join(lines[-1].split())[-300:]
        return Result(step.name, state, time.monotonic() - start, figure, step.unit, error, output)

    def _run(self, step: Step, deadline: float) -> tuple[str, str, str]:
        """State, figure and output."""
        if not step.command:
            write_labelled(self.folder)
            return "ok", "", ""
        if step.kill_at:
            self._processes(step, deadline, until=self.folder / step.kill_at)
        ends = self._processes(step, deadline)
        outputs = [output for _, output in ends]
        failed = [(status, output) for status, output in ends if status != 0]
        for status, output in failed:
            if not (step.refusal and re.search(step.refusal, output)):
                reason = "" if status != -signal.SIGKILL else f"\nnot ended after {step.seconds * self.slowness} s"
                return "failed", "", output + reason
        if len(failed) == len(ends):
            return "ok", "refused", "\n".join(outputs)
        figures = [match for output in outputs for match in re.findall(step.figure, output)] if step.figure else [""]
        if not figures:
            return "failed", "", "\n".join([*outputs, f"the output has no {step.unit or 'figure'}"])
        return "ok", figures[-1], "\n".join(outputs)

    def _processes(self, step: Step, deadline: float, until: Path | None = None) -> list[tuple[int, str]]:
        """Status and output of a step's processes, which are killed at the deadline, or when ``until`` exists."""
        logs = [self.folder / f"{step.name}-{copy}.log" for copy in range(step.copies)]
        processes = [self._start(words_of(step, self.names, copy), log) for copy, log in enumerate(logs)]
        try:
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                if until is not None and until.exists():
                    break
                time.sleep(0.02)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        return [
            (process.wait(), log.read_text(encoding="utf-8", errors="replace"))
            for process, log in zip(processes, logs, strict=True)
        ]

    def _start(self, words: list[str], log: Path) -> subprocess.Popen[bytes]:
        with open(log, "wb") as file:
            return subprocess.Popen(
                words, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip


def chosen(names: list[str] | None) -> list[Step]:
    """The named steps and the steps that they need, in the order of the table; None: all steps."""
    selected = set(names or [step.name for step in STEPS])
    for step in reversed(STEPS):
        if step.name in selected:
            selected.update(step.needs.split())
    return [step for step in STEPS if step.name in selected]


def run_all(steps: list[Step], check: Check, jobs: int, log: IO[str]) -> list[Result]:
    """Run each step as soon as the steps that it needs have ended; print a line when a step ends."""
    results: dict[str, Result] = {}
    pending = list(steps)
    running = set[Future[Result]]()

    def end(result: Result) -> None:
        results[result.name] = result
        print(result, flush=True)
        log.write(f"===== {result}\n{result.output}\n")
        log.flush()

    with ThreadPoolExecutor(jobs) as pool:
        while pending or running:
            for step in [step for step in pending if all(need in results for need in step.needs.split())]:
                pending.remove(step)
                lost = [need for need in step.needs.split() if results[need].state != "ok"]
                if lost or (step.gpu and check.names["device"] == "cpu"):
                    end(Result(step.name, "skipped", error=f"needs {lost[0] if lost else 'a GPU'}"))
                else:
                    running.add(pool.submit(check.run, step))
            done, running = wait(running, return_when=FIRST_COMPLETED) if running else (set(), running)
            for future in done:
                end(future.result())
    return [results[step.name] for step in steps]


def main() -> int:
    """Run the steps; returns 0 if none failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu_check"), help="folder of table and log")
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=[step.name for step in STEPS],
                        help="only these steps, and those that they need")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="only print the names of the steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--jobs", type=int, help="steps at the same time (default: 8 on a GPU, 2 on a CPU)")
    args = parser.parse_args()
    steps = chosen(args.only)
    if args.list:
        print(*(f"{step.name:22}{step.needs}" for step in steps), sep="\n")
        return 0
    name = "cpu" if args.device == "cpu" else torch.cuda.get_device_name(args.device)
    print(f"{len(steps)} steps on {name}, torch {torch.__version__}", flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="gpu_check.") as folder,
        open(args.output / "gpu_check.log", "w", encoding="utf-8") as log,
    ):
        jobs = args.jobs or (2 if args.device == "cpu" else 8)
        results = run_all(steps, Check(Path(folder), args.device), jobs, log)
    seconds = time.monotonic() - begin
    counts = {state: sum(result.state == state for result in results) for state in ("ok", "failed", "skipped")}
    rows = [{key: value for key, value in asdict(result).items() if key != "output"} for result in results]
    facts = {"device": name, "torch": torch.__version__, "seconds": seconds, **counts, "steps": rows}
    (args.output / "gpu_check.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print("", *results, f"{counts} in {seconds:.0f} s; {args.output}/gpu_check.json", sep="\n")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
