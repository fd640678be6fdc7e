"""Make the list of papers, a page of the site: `make docs` writes it into build/docs/papers.md.

Every paper that the code names: what of it is here, the config that runs it and the figure that shows it. Algorithms
say their papers in their docstrings; `PARTS` lists everything else that comes from a paper.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from make_algorithm_pages import (
    CURVES,
    algorithm_classes,
    bench_name,
    command_of,
    measured_in,
    module_of,
    papers,
    recipe_name,
)

from rolljax.config.files import find_config, include_path
from rolljax.trainer.paper import Reproduction

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "rolljax"
RESULTS = DOCS / "recipes.jsonl"
"""Minutes of recipes, measured by benchmarks/recipes.py."""
NOTICE = "<!-- made by docs/make_papers_page.py from the code: do not edit -->"
NAMES = """
1503.02531 Distillation (Hinton)
1506.02438 GAE
1707.06347 PPO
1802.01561 IMPALA
2110.00641 Decoupled PPO
2203.02155 InstructGPT
2305.18290 DPO
2306.13649 GKD
2308.01825 RFT
2402.01306 KTO
2402.03300 DeepSeekMath: GRPO
2402.14740 RLOO
2411.00809 Adaptive segment-level reward
2501.03262 REINFORCE++
2501.12599 Kimi k1.5
2503.14286 TOPR
2503.14476 DAPO
2503.20783 Dr. GRPO
2504.11343 RAFT++
2505.10978 GiGPO
2505.24298 AReaL
2506.13585 MiniMax-M1: CISPO
2506.24119 SPIRAL
2507.18071 GSPO
2508.08221 Tricks or Traps: Lite PPO
2510.01051 GEM
2510.01656 AsyPPO
2510.11345 ROLL Flash
2510.13554 Attention rhythm
2512.24873 ALE and ROME: IPA
2601.05242 GDPO
2601.18734 OPSD
2601.20802 SDPO
2602.02710 MaxRL
2602.04879 DPPO
"""
"""Short names of the algorithms' papers."""
PARTS = """
1707.06203 | Imagination-augmented agents | levels of Sokoban by reverse play | `Sokoban` | |
1711.05101 | Decoupled weight decay | the optimizer | `AdamW` | |
1804.04235 | Adafactor | the optimizer | `Adafactor` | |
1909.08593 | RL from human preferences | a KL coefficient that follows the KL | `AdaptiveKl` | |
1912.09729 | Dual-clip PPO | a bound on the ratio of bad answers | `Grpo.dual_clip` | |
2010.03768 | ALFWorld | household tasks, smaller | `House` | | agents.png
2101.03961 | Switch Transformers | the load-balancing loss | `Recipe.router_aux_coef` | |
2106.09685 | LoRA | adapters | `Recipe.lora` | |
2107.03374 | Codex | pass@k without bias | `eval --attempts` | |
2203.11171 | Self-consistency | maj@k | `eval --attempts` | |
2207.01206 | WebShop | searching and buying, rewards | `Shop` | shop | shop_simulator
2302.06675 | Lion | the optimizer | `Lion` | |
2310.12036 | IPO | a squared preference loss | `Dpo.loss` | |
2402.03898 | DistiLLM | a skewed divergence | `Distill.divergence`, `Distill.alpha` | |
2402.05099 | Hydragen | a prompt is read once for its siblings | `SamplerConfig.cascade_tok` | |
2404.02657 | Rethinking KL in distillation | the adaptive divergence | `Distill.divergence` | |
2404.03683 | Stream of Search | the numbers game | `Countdown` | |
2404.06395 | MiniCPM | a rate that stays, then falls | `AdamW.schedule` | |
2403.13787 | RewardBench | accuracy of judges by section | `Preferences` | |
2405.19107 | DRO | a squared log-ratio in place of a clip, in the training service | `LossSettings.beta` | |
2405.14734 | SimPO | preferences without a reference | `Dpo.loss`, `Dpo.margin` | |
2406.04594 | C4 | who hangs or is slow; simulated: planned paths | `DiagnosisRules`, `NetworkTimings` | |
2406.12045 | tau-bench | its tasks | `TauBench` | |
2407.10671 | Qwen2 | the family | `Qwen2Config` | |
2407.16154 | DDK | shares of domains by how far a student lags behind | `Ddk` | ddk | ddk
2407.21783 | Llama 3 | the family | `Llama3Config` | |
2502.16982 | Moonlight | Muon's updates as large as AdamW's | `Muon.consistent_rms` | |
2503.19786 | Gemma 3 | the family | `Gemma3Config` | |
2503.16385 | DLCoT | long chains of thought, pruned | `Deconstruct`, `Prune`, `Rewrite` | dlcot | dlcot
2505.09388 | Qwen3 | the families | `Qwen3Config`, `Qwen3MoeConfig` | |
2505.14268 | Think-J | judges that think, asked in both orders | `Preferences`, `DigitSums` | think_j | think_j
2505.19690 | Beyond Safe Answers | answers and reasoning judged, mitigations | `Bsa`, `Mitigation` | bsa/judged | bsa
2505.23793 | USB | safety and refusal rates, text part | `Usb` | usb/judged | usb
2507.22879 | RecGPT | interests, tags, fusion, explanations | `RecGpt`, `ExplanationJudge` | recgpt | recgpt
2509.19128 | PipelineRL | requests that continue while weights change | `SamplerConfig.on_publish` | |
2509.21009 | RollPacker | tail batching; simulated: stream training | `Phase.tail_batching`, `StreamTraining` | |
2510.07685 | LiveThinking | rejection tuning; a band of lengths | `LengthBand` | live_thinking | live_thinking
2510.11370 | Router replay | the trainer takes the sampler's experts | `SamplerConfig.record_experts` | |
2511.13841 | DAS | guesses of next tokens from earlier answers | `SamplerConfig.speculate` | |
2512.17206 | Reasoning Palette | latent prefixes of prompts | `Phase.guidance`, `Recipe.prefixes` | palette | palette
2512.22560 | RollArt | kinds of samplers; simulated: serverless rewards | `AffinityConfig`, `RewardTimings` | |
2512.24957 | STAgent | routes tasks: imitation, RL, or neither | `Learnability`, `Taxonomy` | stagent | stagent
2603.17621 | Complementary RL | an extractor of experiences | `WithExperience`, `LaterUses` | extractor | complementary
2601.18225 | ShopSimulator | a shopper who must be asked | `Shop.dialogue` | shop_dialogue | shop_simulator
2605.06534 | ROSE | simulated: rollouts on the GPUs of users | `ServingTimings` | |
"""
"""Papers of what is no algorithm: number | name | what | setting or class | config | figure, or recipe with a page."""


ELSEWHERE = (
    Reproduction(
        "2506.06122",
        "ROLL",
        "one framework for reinforcement learning of many kinds",
        "Sokoban from 13.3 to 35.2 %, validation",
        "Sokoban of one box from .29 to .70, GRPO, held out",
        "shown",
        seeds=3,
        config="gem",
        figure="rolljax/recipes/gem/gem.png",
    ),
    Reproduction(
        "2503.09527",
        "CombatVLA",
        "a small model of vision, language and action fights in games",
        "50 times as fast as others, and better than people",
        "",
        "not shown",
        why="it is not here: no model of rolljax reads images",
    ),
)
"""Papers that have no module of their own, and what of each is shown."""


def reproductions() -> list[Reproduction]:
    """Return what every module's `REPRODUCTION` says, and `ELSEWHERE`, by name."""
    found = list(ELSEWHERE)
    for path in PACKAGE.rglob("*.py"):
        if re.search(r"^REPRODUCTION = ", path.read_text(), re.M):
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            found.append(importlib.import_module(name).REPRODUCTION)
    return sorted(found, key=lambda r: r.name.lower())


def configs() -> list[str]:
    """Return the configs that the page names as the ones of papers, without repetition."""
    parts = [line.split("|")[4].strip() for line in PARTS.strip().splitlines()]
    return list(dict.fromkeys(filter(None, [*(r.config for r in reproductions()), *parts])))


def results() -> list[dict]:
    """Return the measured recipes."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []


def lines_of(path: str) -> Iterator[str]:
    """Yield the lines of a gin file and of the files that it includes, without comments."""
    for line in Path(path).read_text().splitlines():
        if found := re.match(r"include '(.*)'", line):
            yield from lines_of(include_path(path, found[1]))
        elif line and not line.startswith("#"):
            yield line


def fingerprint(config: str) -> str:
    """Return a hash of a config's settings, which changes with every setting and with no comment."""
    return hashlib.sha256("\n".join(lines_of(find_config(config))).encode()).hexdigest()[:16]


def minutes_of(config: str) -> float | None:
    """Return the measured minutes of a config. None: it was not measured, or other settings were."""
    found = [r["minutes"] for r in results() if r["config"] == config and r["settings"] == fingerprint(config)]
    return found[0] if found else None


def reproduction_rows() -> list[str]:
    """Return a row for each paper: what it claims, and how far that is shown here."""
    rows = []
    for r in reproductions():
        name = linked(r.paper, r.name) if r.paper else r.name
        config = f"[`{r.config}`]({os.path.relpath(find_config(r.config), DOCS)})" if r.config else ""
        figure = f"[figure]({os.path.relpath(PACKAGE.parent / r.figure, DOCS)})" if r.figure else ""
        state = f"{r.state}: {r.why}" if r.why else r.state
        minutes = minutes_of(r.config) if r.config else None
        took = "" if minutes is None else f"{max(minutes, 1):.0f}"
        cells = (name, r.claim, config, took, r.there, r.here, str(r.seeds or ""), figure, state)
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def named_in_code() -> set[str]:
    """Return the numbers of the papers that a file of the package names."""
    texts = (p.read_text() for p in PACKAGE.rglob("*.py"))
    return {number for text in texts for number in re.findall(r"arXiv[: ](\d{4}\.\d{4,5})", text)}


def number_of(text: str) -> list[str]:
    """Return the numbers of papers in a text, in order."""
    return re.findall(r"arXiv (\d{4}\.\d{4,5})", text)


def linked(number: str, name: str) -> str:
    """Return a paper's name as a link."""
    return f"[{name}](https://arxiv.org/abs/{number})"


def algorithm_rows() -> list[str]:
    """Return a row for each algorithm, in the order of its files."""
    names = dict(line.split(" ", 1) for line in NAMES.strip().splitlines())
    measured, rows = measured_in(CURVES), []
    for classes in algorithm_classes().values():
        for cls in classes:
            module, recipe = module_of(cls), recipe_name(cls)
            of = ", ".join(linked(n, names[n]) for n in number_of(papers(cls))) or "standard practice"
            page = f"[`{cls.__name__}`](algorithms/{module}.md#{f'{module}{cls.__name__}'.lower()})"
            curve = f"[curve](algorithms/curves/{recipe}.png)" if bench_name(cls) in measured else ""
            config, settings = command_of(cls)
            run = " ".join([f"[`{config}`](../configs/{config}.gin)", *(f"`{s}`" for s in settings)])
            rows.append(f"| {of} | {page} | {run} | {curve} |")
    return rows


def part_rows() -> list[str]:
    """Return a row for each paper that is no algorithm."""
    rows = []
    for line in PARTS.strip().splitlines():
        number, name, what, setting, config, figure = (cell.strip() for cell in line.split("|"))
        config = f"[`{config}`]({os.path.relpath(find_config(config), DOCS)})" if config else ""
        if figure and not figure.endswith(".png"):
            figure = f"[page](../rolljax/recipes/{figure}/README.md)"
        elif figure:
            figure = f"[figure]({figure})"
        rows.append(f"| {linked(number, name)} | {what} | {setting} | {config} | {figure} |")
    return rows


def page() -> str:
    """Return the page."""
    lines = [
        NOTICE,
        "",
        "# Papers",
        "",
        "The implemented parts of each paper, their configs and figures. [Defaults](algorithms/defaults.md) compares",
        "the papers' settings with our defaults; [the figures](algorithms.md#measured-on-small-problems) show small",
        "problems.",
        "",
        "## What is shown",
        "",
        "*Shown*: the effect that the paper claims is here too, on a smaller problem, on at least three seeds and in a",
        "figure. No row repeats a paper's figure at its own size: the models here have a million parameters or less.",
        "",
        "Minutes are an estimate for this config alone on two cores, from a few steps of each phase",
        "(`python benchmarks/recipes.py`); empty: not measured.",
        "",
        "The first lines of each file give its full command: a preset needs a recipe too, and `judged` is for",
        "`rolljax.eval`.",
        "",
        "| paper | claim | `--gin` | minutes | figure there | figure here | seeds | picture | state |",
        "|---|---|---|---|---|---|---|---|---|",
        *reproduction_rows(),
        "",
        "## Algorithms",
        "",
        "| papers | algorithm | `--gin` and `--set` | figure |",
        "|---|---|---|---|",
        *algorithm_rows(),
        "",
        "`python benchmarks/effects.py` compares credit by attention rhythm and by Lite PPO with controls",
        "([figure](effects.png)), `segments.py` [segment rewards](segments.png), `mini_critics.py`",
        "[AsyPPO](mini_critics.png). [ROME](../rolljax/recipes/rome/README.md) trains an agent by IPA.",
        "",
        "## Parts",
        "",
        "| paper | what | setting | `--gin` | figure |",
        "|---|---|---|---|---|",
        *part_rows(),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
