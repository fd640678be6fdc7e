"""The losses of TRL, computed by TRL's own trainers on a batch that is frozen: the other framework's opinion.

Every function builds the real trainer around a Hugging Face folder and hands it the batch at the place where its own
rollout or data set would have made one: completions, rewards and sampler log-probs through `rollout_func` and a reward
function, log-probs of the old policy and of the reference where the trainer would have scored them, pairs and
supervised sequences as a data set. From there on it is TRL's code up to and including the loss; torch differentiates
it. Nothing is downloaded, everything is float32 on CPU.

TRL has no PPO trainer any more; its GRPO loss with advantages per token and `delta` is PPO's dual-clipped surrogate.

Shape letters: N sequences, T tokens of a completion (its own length in each sequence), P tokens of a prompt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import datasets
import numpy as np
import torch
import transformers
import trl  # whose classes are imported when they are used

datasets.disable_progress_bars()
transformers.utils.logging.disable_progress_bar()


@dataclasses.dataclass(frozen=True, eq=False)
class FrozenBatch:
    """Sampled sequences and everything that is known about them; siblings of a group stand side by side.

    group_size: siblings of every group. prompts: N arrays `[P]` of ids. completions: N arrays `[T]` of ids.
    sampled: N bool arrays `[T]`, False where the environment wrote the token (no loss, no credit).
    truncated [N]: cut by the limit, so that no end-of-sequence token ends the completion. limit_tok: that limit.
    rewards [N]. advantages: N arrays `[T]` of one advantage per token; None: TRL makes them from the rewards.
    sampler_logp, trainer_logp, ref_logp: N float32 arrays `[T]`, nats: of the policy that sampled, of the trainer's at
      the start of the step, of the reference. Ignored where not `sampled`.
    """

    group_size: int
    prompts: list[np.ndarray]
    completions: list[np.ndarray]
    sampled: list[np.ndarray]
    truncated: np.ndarray
    limit_tok: int
    rewards: np.ndarray
    advantages: list[np.ndarray] | None
    sampler_logp: list[np.ndarray]
    trainer_logp: list[np.ndarray]
    ref_logp: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.prompts)


class Verdict(NamedTuple):
    """What TRL says: the loss, and its gradient by tensor of the folder (float32, shapes of the folder)."""

    loss: float
    grads: dict[str, np.ndarray]


def grpo(
    model_dir: Path, frozen: FrozenBatch, *, anchor: str = "sampler_logp", corrected: bool = False, **settings: Any
) -> Verdict:
    """Compute `GRPOTrainer`'s loss: GRPO, DAPO, Dr. GRPO, GSPO, CISPO, and PPO's surrogate, by `settings`.

    Args:
      anchor: which log-probs of the batch the ratio divides by ("sampler_logp" or "trainer_logp").
      corrected: weigh tokens by the ratio of trainer to sampler as TRL does for samples of another engine
        (`vllm_importance_sampling_mode`, `vllm_importance_sampling_clip_max`); the anchor is then "trainer_logp".
      settings: of `GRPOConfig`; `loss_type` "grpo" is the mean of sequence means, "dapo" the token mean, "dr_grpo"
        divides by N times `limit_tok`.
    """
    with _arguments(trl.GRPOConfig, frozen, _GRPO | {"max_completion_length": frozen.limit_tok} | settings) as args:
        trainer = _grpo_trainer(model_dir, frozen, args)
        if corrected:  # the engine itself is never asked: the rollout is frozen
            trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
        inputs = _grpo_inputs(trainer, frozen, getattr(frozen, "trainer_logp" if corrected else anchor))
        if frozen.advantages is not None:
            inputs["advantages"] = _padded(frozen.advantages)
        return _verdict(trainer.model, trainer.compute_loss(trainer.model, inputs))


def grpo_advantages(model_dir: Path, frozen: FrozenBatch, **settings: Any) -> np.ndarray:
    """Compute `GRPOTrainer`'s advantages `[N]` of the rewards (it adds 1e-4 to the standard deviation)."""
    with _arguments(trl.GRPOConfig, frozen, _GRPO | settings) as args:
        trainer = _grpo_trainer(model_dir, frozen, args)
        return _grpo_inputs(trainer, frozen, frozen.sampler_logp)["advantages"].numpy()


def dpo(model_dir: Path, frozen: FrozenBatch, pairs: Sequence[tuple[int, int]], **settings: Any) -> Verdict:
    """Compute `DPOTrainer`'s loss of (chosen, rejected) sequences of the batch, mean over pairs.

    `settings` are `DPOConfig`'s: `loss_type` ["sigmoid"], ["ipo"] (log-ratios averaged over tokens), ["robust"], ...,
    `loss_weights`, `beta`. The reference is `ref_logp`.
    """
    rows = _preferences(frozen, pairs)
    with _arguments(trl.DPOConfig, frozen, {"max_length": None} | settings) as args:
        trainer = trl.DPOTrainer(
            model=_model(model_dir),
            ref_model=_model(model_dir),
            args=args,
            processing_class=_tokenizer(model_dir),
            train_dataset=datasets.Dataset.from_list([{"prompt": "p", "chosen": "c", "rejected": "r"}]),
        )
        trainer.precompute_ref_logps = True  # from here on the collator hands on what the batch says of the reference
        inputs = trainer.data_collator(rows)
        return _verdict(trainer.model, trainer.compute_loss(trainer.model, inputs))


def kto(
    model_dir: Path, frozen: FrozenBatch, good: Sequence[bool], ref_next_logp: Sequence[np.ndarray], **settings: Any
) -> Verdict:
    """Compute `KTOTrainer`'s loss of every sequence, mean over them; its KL is that of the answers of one group after
    the prompt of the next one.

    Args:
      good: label of each sequence. ref_next_logp: N arrays `[T]`, the reference's log-probs of its tokens after that
        prompt. settings: of `KTOConfig`: `beta`, `desirable_weight`, `undesirable_weight`.
    """
    assert all(sampled.all() for sampled in frozen.sampled), "TRL's preferences know no observations"
    rows = []
    for n in range(len(frozen)):
        before = (n - frozen.group_size) % len(frozen)
        rows.append(
            {
                "prompt_ids": frozen.prompts[n].tolist(),
                "completion_ids": frozen.completions[n].tolist(),
                "KL_completion_ids": frozen.completions[before].tolist(),
                "label": bool(good[n]),
                "ref_logps": float(frozen.ref_logp[n].astype(np.float64).sum()),
                "ref_KL_logps": float(ref_next_logp[before].astype(np.float64).sum()),
            }
        )
    with _arguments(trl.KTOConfig, frozen, {"max_length": None} | settings) as args:
        trainer = trl.KTOTrainer(
            model=_model(model_dir),
            ref_model=_model(model_dir),
            args=args,
            processing_class=_tokenizer(model_dir),
            train_dataset=datasets.Dataset.from_list([{"prompt": "p", "completion": "c", "label": True}] * 2),
        )
        trainer.precompute_ref_logps = True
        return _verdict(trainer.model, trainer.compute_loss(trainer.model, trainer.data_collator(rows)))


def sdpo(model_dir: Path, frozen: FrozenBatch, shown: Sequence[int]) -> Verdict:
    """Compute `SDPOTrainer`'s loss of the sampled tokens, token mean over the sequences that are taught.

    shown: the sequence that stands before each one's prompt when the teacher scores it; -1: it is not taught.
    """
    from trl.experimental.sdpo.loss_utils import compute_sampled_token_self_distillation_loss

    model, losses = _model(model_dir), []
    for n, other in enumerate(shown):
        if other < 0:
            continue
        own, answer = [frozen.prompts[n], frozen.completions[n]], torch.from_numpy(frozen.completions[n])[None]
        ids = [own, [frozen.prompts[other], frozen.completions[other], *own]]
        logits = [model(torch.from_numpy(np.concatenate(x).astype(np.int64))[None]).logits for x in ids]
        student, teacher = (x[:, -answer.shape[1] - 1 : -1] for x in logits)
        losses.append(
            compute_sampled_token_self_distillation_loss(student, teacher.detach(), answer, distillation_alpha=1.0)
        )
    return _verdict(model, torch.cat(losses, 1).mean())


def conservative_dpo(
    model_dir: Path, frozen: FrozenBatch, pairs: Sequence[tuple[int, int]], **settings: Any
) -> Verdict:
    """Compute DPO whose labels may be wrong (`label_smoothing`), mean over pairs.

    TRL's "sigmoid" has no label smoothing. Its "aot_unpaired" has, and sorts the log-ratios of a batch before it
    subtracts them; of a batch of one pair that leaves exactly conservative DPO.
    """
    each = [dpo(model_dir, frozen, [pair], loss_type=["aot_unpaired"], **settings) for pair in pairs]
    return Verdict(
        float(np.mean([v.loss for v in each])),
        {name: np.mean([v.grads[name] for v in each], axis=0) for name in each[0].grads},
    )


def simpo(model_dir: Path, frozen: FrozenBatch, pairs: Sequence[tuple[int, int]], **settings: Any) -> Verdict:
    """Compute `CPOTrainer`'s SimPO: mean log-probs per token, no reference; `beta`, `simpo_gamma`, mean over pairs."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    with _arguments(CPOConfig, frozen, {"loss_type": "simpo", "cpo_alpha": 0.0} | settings) as args:
        trainer = CPOTrainer(
            model=_model(model_dir),
            args=args,
            processing_class=_tokenizer(model_dir),
            train_dataset=datasets.Dataset.from_list([{"prompt": "p", "chosen": "c", "rejected": "r"}]),
        )
        rows = [
            {
                f"{side}_{what}": value
                for side in ("chosen", "rejected")
                for what, value in {
                    "input_ids": row["prompt_ids"] + row[f"{side}_ids"],
                    "attention_mask": [1] * len(row["prompt_ids"] + row[f"{side}_ids"]),
                    "labels": [-100] * len(row["prompt_ids"]) + row[f"{side}_ids"],
                }.items()
            }
            for row in _preferences(frozen, pairs)
        ]
        return _verdict(trainer.model, trainer.compute_loss(trainer.model, trainer.data_collator(rows)))


def sft(model_dir: Path, frozen: FrozenBatch, **settings: Any) -> Verdict:
    """Compute `SFTTrainer`'s cross-entropy of the `sampled` tokens, token mean over the batch."""
    rows = [
        {
            "input_ids": np.concatenate([prompt, completion]).tolist(),
            "completion_mask": [0] * len(prompt) + [1] * len(completion),
            "assistant_masks": [0] * len(prompt) + sampled.astype(int).tolist(),
        }
        for prompt, completion, sampled in zip(frozen.prompts, frozen.completions, frozen.sampled, strict=True)
    ]
    fixed = {"max_length": None, "completion_only_loss": True, "shuffle_dataset": False}
    with _arguments(trl.SFTConfig, frozen, fixed | settings) as args:
        trainer = trl.SFTTrainer(
            model=_model(model_dir),
            args=args,
            processing_class=_tokenizer(model_dir),
            train_dataset=datasets.Dataset.from_list(rows),
        )
        inputs = trainer.data_collator(list(trainer.train_dataset))
        return _verdict(trainer.model, trainer.compute_loss(trainer.model, inputs))


def token_logp(model_dir: Path, frozen: FrozenBatch, temperature: float = 1.0) -> list[np.ndarray]:
    """Compute `transformers`' log-probs of the completions, N float32 arrays `[T]`, one sequence at a time, without
    padding."""
    model, out = _model(model_dir), []
    for prompt, completion in zip(frozen.prompts, frozen.completions, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
        with torch.no_grad():
            logp = torch.log_softmax(model(ids).logits[0, :-1] / temperature, dim=-1)
        out.append(logp.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0].numpy())
    return out


_GRPO = {"beta": 0.0, "num_iterations": 2}
"""With one iteration TRL takes the current policy for the old one, and the ratio is 1."""


@contextlib.contextmanager
def _arguments(kind: type, frozen: FrozenBatch, settings: dict[str, Any]) -> Iterator[Any]:
    fixed = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": len(frozen),
    }
    if kind is trl.GRPOConfig:
        fixed["num_generations"] = frozen.group_size
    with tempfile.TemporaryDirectory(prefix="rolljax-trl-") as folder:
        yield kind(output_dir=folder, **fixed | settings)


def _model(model_dir: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def _tokenizer(model_dir: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(model_dir)


def _grpo_trainer(model_dir: Path, frozen: FrozenBatch, args: Any) -> trl.GRPOTrainer:
    def rollout(prompts: list[Any], trainer: trl.GRPOTrainer) -> dict[str, Any]:
        return {
            "prompt_ids": [ids.tolist() for ids in frozen.prompts],
            "completion_ids": [ids.tolist() for ids in frozen.completions],
            "logprobs": [logp.tolist() for logp in frozen.sampler_logp],
            "env_mask": [sampled.astype(int).tolist() for sampled in frozen.sampled],
        }

    def rewards(completions: list[Any], **columns: Any) -> list[float]:
        return frozen.rewards.tolist()

    trainer = trl.GRPOTrainer(
        model=_model(model_dir),
        args=args,
        reward_funcs=rewards,
        processing_class=_tokenizer(model_dir),
        train_dataset=datasets.Dataset.from_list([{"prompt": "p"}] * len(frozen)),
        rollout_func=rollout,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # its training loop sets this
    return trainer


def _grpo_inputs(trainer: trl.GRPOTrainer, frozen: FrozenBatch, old_logp: list[np.ndarray]) -> dict[str, Any]:
    """Make a batch as TRL does from a rollout, with the frozen log-probs in place of its own."""

    def score(model: Any, *args: Any, **options: Any) -> tuple[torch.Tensor, None, None]:
        return _padded(frozen.ref_logp if model is trainer.ref_model else old_logp), None, None

    with mock.patch.object(trainer, "_get_per_token_logps_and_entropies", score):
        inputs = trainer._generate_and_score_completions([{"prompt": "p"} for _ in range(len(frozen))])
    assert inputs["old_per_token_logps"].shape == inputs["completion_mask"].shape
    return inputs


def _preferences(frozen: FrozenBatch, pairs: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return rows for TRL's collators. Reference log-probs are summed in float64 over the completion."""
    assert all(frozen.sampled[n].all() for pair in pairs for n in pair), "TRL's preferences know no observations"
    return [
        {
            "prompt_ids": frozen.prompts[chosen].tolist(),
            "chosen_ids": frozen.completions[chosen].tolist(),
            "rejected_ids": frozen.completions[rejected].tolist(),
            "ref_chosen_logps": float(frozen.ref_logp[chosen].astype(np.float64).sum()),
            "ref_rejected_logps": float(frozen.ref_logp[rejected].astype(np.float64).sum()),
        }
        for chosen, rejected in pairs
    ]


def _padded(values: Sequence[np.ndarray]) -> torch.Tensor:
    """Return ragged rows as float32 `[N, longest]`, 0 beyond their ends."""
    rows = [torch.from_numpy(np.asarray(v, np.float32)) for v in values]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _verdict(model: Any, loss: Any) -> Verdict:
    model.zero_grad()
    loss.backward()
    return Verdict(loss.item(), {name: p.grad.numpy().copy() for name, p in model.named_parameters()})
