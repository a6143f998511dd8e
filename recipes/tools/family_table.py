"""Runs the exactness harness over all tiny families and writes the tables of the results.

    python recipes/tools/family_table.py llama gemma3_text   # prints Markdown
    python recipes/tools/family_table.py --write llama   # its row in recipes/MODELS.md
    python recipes/tools/family_table.py --write   # all rows

Rows are also written into a list, which `sppo check --list` prints, and which says what families
conversion need not try.

The exit code is 1 if any family is neither exact nor refused.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto.configuration_auto import model_type_to_module_name

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.model_parts import find_parts
from sppo_hf.errors import ConfigError, SPPOError
from sppo_hf.testing.check import CheckResult, check_model
from sppo_hf.testing.tiny_families import FAMILIES
from sppo_hf.testing.tiny_models import build_tiny_model, tiny_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path("recipes/MODELS.md")
LIST = Path("sppo_hf/engine/families.json")
LONGEST = Path("sppo_hf/cli/checkpoints.json")
"""File that `checkpoint_table.py` writes."""
CENSUS = Path("recipes/tools/census.json")
"""File that `census.py` writes: numbers of types by version of Transformers, and what became of
those that take images."""
TOKENS = 29
SETTINGS = (
    SPPOConfig(num_chunks=1, recompute="full", offload="none"),
    SPPOConfig(chunk_lengths=(1, 6, 3, 5, 2, 12), recompute="none", offload="full"),
    SPPOConfig(chunk_lengths=(1, 6, 3, 5, 2, 12), recompute="full", offload="none"),
)
CODE = {
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba", "zamba"), "ssm_state = torch.zeros("),
    "minimax": "for i in range(seq_len):",
    "recurrent_gemma": "self.conv1d_state = nn.functional.pad(x_branch",
    "rwkv": "state[1][:, :, self.layer_id] = hidden[:, -1]",
    "xlstm": "rnn_state[layer_idx][state_idx].copy_(",
    "diffllama": "attn_output2, _ = attention_interface(",
    "doge": "if attention_mask.dtype == torch.bool:",
    "deepseek_v4": "top_k = min(self.index_topk, compressed_len)",
    "qwen4_exp_text": "scores.topk(min(self.block_topk, num_complete_blocks)",
}
"""The line of each refused family's code that rules it out; shown with the line's number.

A test looks for each in the installed Transformers."""
ONE_TOKEN = SPPOConfig(
    chunk_lengths=(1,) * TOKENS, recompute="full", offload="full", min_offload_size=1
)
"""Not for models with recurrent states, whose later chunks have at least two tokens."""


# Errors of one family, after which the others still run.
_CRASHES = (TypeError, RuntimeError, AttributeError, LookupError, AssertionError, ValueError)


class Row(NamedTuple):
    """One family in the table."""

    name: str
    feature: str
    status: str
    error: float
    reason: str
    proved: Sequence[str] = ()
    """Model types that conversion takes without a trial; see `engine/family_guard.py`."""


def check_family(name: str) -> Row:
    """Return the worst result of several chunkings and modes, or the reason of the refusal."""
    feature = FAMILIES[name].feature
    results: list[CheckResult] = []
    single = [] if _has_states(name) else [ONE_TOKEN]
    for settings in [*SETTINGS, *single]:
        try:
            result = check_model(name, settings, tokens=TOKENS)
        except ConfigError as error:
            return Row(name, feature, "refused", 0.0, short_reason(str(error)))
        except _CRASHES as error:
            return Row(name, f"{feature} ({type(error).__name__})", "NOT EXACT", math.inf, "")
        if result.status == "refused":
            return Row(
                name, feature, "refused", 0.0, short_reason(result.reason) + line_of_code(name)
            )
        results.append(result)
    worst = max(results, key=lambda result: result.error or 0.0)
    status = "exact" if all(result.status == "exact" for result in results) else "NOT EXACT"
    return Row(name, feature, status, worst.error or 0.0, "", _proved(name, status))


def _proved(name: str, status: str) -> list[str]:
    """The family's model type and its text decoder's; none if it has states, which need a trial."""
    if status != "exact" or _has_states(name):
        return []
    config = tiny_config(name)
    return sorted({FAMILIES[name].model_type, config.get_text_config().model_type})


def line_of_code(name: str) -> str:
    """Return file and line of a family's `CODE`, as the end of a sentence; "" if it has none.

    Raises:
        LookupError: The installed Transformers has no such line: check whether the reason holds.
    """
    if name not in CODE:
        return ""
    module = model_type_to_module_name(name)
    path = Path(transformers.__file__).with_name("models") / module / f"modeling_{module}.py"
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if CODE[name] in line:
            return f" ({path.name}, line {number}: `{line.strip()}`)"
    raise LookupError(f"{CODE[name]!r} is not in {path.name} of {transformers.__version__}")


def _has_states(name: str) -> bool:
    try:
        return find_parts(build_tiny_model(name)).has_recurrent_state
    except SPPOError:
        return False  # the reason of the refusal comes from the check


def short_reason(reason: str) -> str:
    """The reason alone: neither the model's name in front nor the remedy behind."""
    reason = re.split(r"\. (?:Train|Set|sppo_hf|Load|Remedy)|; (?:only|save)", reason)[0]
    reason = re.sub(
        r"^(?:(?:\w+|this model) cannot (?:be trained|run) chunk by chunk: )+", "", reason
    )
    return re.sub(r"^\w+: ", "", reason)


def markdown(rows: Sequence[Row]) -> str:
    """Two tables: what is exact, and what is refused and why."""
    bar = r"\|"
    lines = [
        "| family | what it exercises | worst relative error, float64 |",
        "|---|---|---|",
    ]
    for row in rows:
        if row.status != "refused":
            mark = "" if row.status == "exact" else " **NOT EXACT**"
            lines.append(f"| {row.name} | {row.feature} | {row.error:.0e}{mark} |")
    lines += ["", "| refused | reason |", "|---|---|"]
    refused = [row for row in rows if row.status == "refused"]
    lines += [f"| {row.name} | {row.reason.replace('|', bar)} |" for row in refused]
    return "\n".join(lines) + "\n"


def checkpoints_markdown(found: Mapping[str, Any]) -> str:
    """The table of checkpoints, from the JSON object of `LONGEST`."""
    lines = [
        "| checkpoint | family | parameters | longest predicted, tokens | made for, tokens |",
        "|---|---|---|---|---|",
    ]
    for row in found["checkpoints"]:
        longest = f"{row['longest_tokens']:,}" if row["longest_tokens"] else "none fits"
        made_for = f"{row['positions_tokens']:,}" if row["positions_tokens"] else "any"
        size = f"{row['parameters'] / 1e9:.2f}B"
        lines.append(f"| {row['name']} | {row['family']} | {size} | {longest} | {made_for} |")
    return "\n".join(lines) + "\n"


def census_markdown(found: Mapping[str, Mapping[str, float]]) -> str:
    """The table of counts, from the `counts` of the JSON object of `CENSUS`."""
    columns = ("exact", "text decoder alone", "refused", "not tried", "not exact")
    lines = [f"| Transformers | {' | '.join(columns)} | worst error |", f"|---|{'---|' * 6}"]
    for version, counts in found.items():
        cells = " | ".join(str(counts.get(name, 0)) for name in columns)
        lines.append(f"| {version} | {cells} | {counts['worst error']:.0e} |")
    return "\n".join(lines) + "\n"


def images_markdown(groups: Sequence[Mapping[str, Any]]) -> str:
    """The table of types that take images, from the groups of `CENSUS`."""
    lines = ["| with images | types |", "|---|---|"]
    for group in groups:
        worst = f"worst error {group['worst error']:.0e}"
        detail = worst if group["status"] in ("exact", "not exact") else group["reason"]
        lines.append(
            f"| {len(group['types'])} {group['status']}: {detail} | {', '.join(group['types'])} |"
        )
    return "\n".join(lines) + "\n"


def write_list(root: Path, rows: Sequence[Row], *, whole: bool) -> None:
    """Writes `LIST`; unless `whole`, the rows of other families stay as they are.

    Raises:
        ConfigError: The others were found with another version of Transformers.
    """
    made = {row.name: row._asdict() for row in rows}
    if not whole and (root / LIST).is_file():
        known = json.loads((root / LIST).read_text(encoding="utf-8"))
        if known["transformers"] != transformers.__version__:
            raise ConfigError(
                f"{LIST} was made with Transformers {known['transformers']}, and"
                f" {transformers.__version__} is installed. Remedy: --write without families"
            )
        made = {row["name"]: row for row in known["families"]} | made
    listed = [made[name] for name in FAMILIES if name in made]
    families = {"transformers": transformers.__version__, "families": listed}
    (root / LIST).write_text(json.dumps(families, indent=1) + "\n", encoding="utf-8")


def write_page(root: Path) -> None:
    """Writes `PAGE` from `LIST`, `LONGEST` and `CENSUS`, which say what was found."""
    found = json.loads((root / LIST).read_text(encoding="utf-8"))
    rows = [Row(**row) for row in found["families"]]
    text = f"""# Which models work

Loss and every gradient of a tiny model of each family, chunked against unmodified, in float64: the
worst error of any gradient, relative to the parameter's largest (1e-9 is the limit), over several
chunkings and modes. Made by `python recipes/tools/family_table.py --write` with Transformers
{found["transformers"]}; `sppo check --list` prints it. A family that is not here is tested the
same way by `sppo check MODEL`, and refused where it would not be exact.

{markdown(rows)}"""
    if (root / LONGEST).is_file():
        longest = json.loads((root / LONGEST).read_text(encoding="utf-8"))
        text += f"""
## How long on one GPU

The longest sequence that the planner predicts to fit one 80 GB H100 with {longest["host_memory"]}
of host memory: LoRA of rank {longest["lora_rank"]} on all linear layers, bf16, one row, no disk.
Nothing here was measured, and it says nothing of speed: `sppo estimate` has both. "Made for" is
where a model's positions end without scaling them further. Sizes are from public descriptions.
Made by `python recipes/tools/checkpoint_table.py --write`; `sppo check --list` prints it, too.

{checkpoints_markdown(longest)}"""
    if (root / CENSUS).is_file():
        census = json.loads((root / CENSUS).read_text(encoding="utf-8"))
        text += f"""
## Every type of Transformers

Each type of which `AutoModelForCausalLM`, `AutoModelForImageTextToText` or
`AutoModelForMultimodalLM` makes a model, as a tiny random one, tried the same way by
`python recipes/tools/census.py --write`. "Text decoder alone": the whole cannot be built so small,
its decoder can. "Not tried": neither can, or it does not run without pixels or sound. Classifiers
are those of these types under `AutoModelForSequenceClassification`, `ForTokenClassification` and
`ForQuestionAnswering`; those of encoders (BERT) are refused.

{census_markdown(census["counts"])}
## With images

Those of these types that take images: loss and every gradient, the encoder's among them, of two
rows of text with three images, given as the type's processor gives them (with token types, if it
makes some). Whatever is in the first row is exact on text, too; so are the others except those "on
text, too" and "nor on text". A batch that is refused raises an error that says why.

Tokens of an image see each other in both directions in Gemma 3, ShieldGemma 2, Gemma 4 Unified and
checkpoints of Gemma 4 whose `text_config` has `use_bidirectional_attention="vision"`, its larger
ones (here "gemma4-bidirectional"). Chunks then end beside images. `sppo check MODEL` tries images,
too. Videos are exact with Qwen2.5-VL and Qwen3-VL, sound with Voxtral and Qwen2-Audio
(`tests/engine/test_multimodal.py`); other types were not tried with them. Made with
Transformers {census["images"]["transformers"]}.

{images_markdown(census["images"]["groups"])}"""
    (root / PAGE).write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and write; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", default=None, help="default: all")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE} and {LIST}")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder that they are below")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.families or ()) - set(FAMILIES))
    if unknown:
        parser.error(f"unknown families {unknown}; known: {', '.join(FAMILIES)}")
    transformers.logging.set_verbosity_error()
    # Products of a few thousand numbers: handing them to other threads takes ten times as long.
    torch.set_num_threads(1)
    rows = []
    for name in options.families or FAMILIES:
        rows.append(check_family(name))
        print(f"{name}: {rows[-1].status}", file=sys.stderr, flush=True)
    if options.write:
        write_list(options.root, rows, whole=not options.families)
        write_page(options.root)
    else:
        print(markdown(rows), end="")
    return int(any(row.status == "NOT EXACT" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
