"""Model outputs for packed rows. The only place that shifts: a token is judged by the hidden state before it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rolljax.model.attention import packed
from rolljax.model.decoder import Decoder, Model, Params
from rolljax.model.gather import before
from rolljax.model.moe import Load
from rolljax.model.value import ValueModel
from rolljax.trainer import vocab
from rolljax.trainer.algorithms.base import DivergenceTerm, PolicyOutputs
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.mesh import num_batch_shards


@dataclasses.dataclass(frozen=True)
class NumShards:
    """Into how many shards a mesh splits the vocabulary, the rows of a batch, and each row."""

    vocab: int = 1
    rows: int = 1
    context: int = 1

    @staticmethod
    def of(mesh: Mesh) -> NumShards:
        return NumShards(mesh.shape["tensor"], num_batch_shards(mesh), mesh.shape["context"])

    def blocks(self) -> dict[str, int]:
        """Return the arguments that size the blocks of `trainer.vocab`; its bytes per block count all devices
        together."""
        return {"shards": self.vocab, "block_bytes": vocab.BLOCK_BYTES * self.rows * self.vocab}


UNSHARDED = NumShards()


def hidden_before(model: Model, params: Params, batch: TokenBatch) -> tuple[Decoder, jax.Array, Load | None]:
    """Return the bound decoder; for every token the final hidden state of its predecessor `batch.prev`, `[B, T, D]`;
    and the load of the experts, if there are any. Tokens are routed to the experts in `batch.expert_ids_Lk`, if given.
    """
    decoder = model.bind(params)
    attend = packed(batch.segment_ids, batch.branch_ids, batch.positions, model.attention)
    replayed = None if batch.expert_ids_Lk is None else jnp.moveaxis(batch.expert_ids_Lk, 2, 0)
    out = decoder(batch.tokens, batch.positions, attend, expert_ids_LBTk=replayed)
    load = out.mixtures and Load.of(out.mixtures, batch.segment_ids > 0, replayed)
    return decoder, before(out.hidden, batch.prev), load


def without_experts(batch: TokenBatch) -> TokenBatch:
    """Return the batch for a model other than the policy, whose routers choose their own experts."""
    return dataclasses.replace(batch, expert_ids_Lk=None)


def policy_outputs(
    model: Model,
    params: Params,
    batch: TokenBatch,
    *,
    entropy_grad: bool = False,
    reference: tuple[DivergenceTerm, Model, Params] | None = None,
    shards: NumShards = UNSHARDED,
) -> PolicyOutputs:
    """Compute log-prob and entropy of every token of rows `[B, T]`, and the divergence from a reference policy's
    distribution.

    Values of tokens that were not sampled are arbitrary: mask before use. The logits `[B, T, V]` of a large vocabulary
    are never materialised (`trainer.vocab`).

    Args:
      reference: which divergence, and the reference's model and parameters; None: no divergence.
    """
    decoder, hidden, load = hidden_before(model, params, batch)
    head, cap, how = decoder.head_matrix, model.cfg.final_softcap, shards.blocks()
    scored = batch.sequence_ids > 0 if shards.context == 1 else None
    logp, entropy = vocab.token_logp(
        hidden, head, batch.tokens, batch.temperature, softcap=cap, entropy_grad=entropy_grad, scored=scored, **how
    )
    if reference is None:
        return PolicyOutputs(logp, entropy, load=load)
    settings, ref_model, ref_params = reference
    teacher, teacher_hidden, _ = hidden_before(ref_model, jax.lax.stop_gradient(ref_params), without_experts(batch))
    teacher_cap = ref_model.cfg.final_softcap
    tau = batch.temperature if settings.tau is None else jnp.float32(settings.tau)
    factor = 1 / jnp.square(tau) if settings.tau is None else 1.0  # of what has been multiplied by tau^2
    if not settings.top_k:
        divergence = vocab.divergence(
            hidden,
            head,
            jax.lax.stop_gradient(teacher_hidden),
            teacher.head_matrix,
            settings.kind,
            tau,
            alpha=settings.alpha,
            softcap=cap,
            teacher_softcap=teacher_cap,
            **how,
        )
        return PolicyOutputs(logp, entropy, factor * divergence, load)
    ids, teacher_logp = vocab.topk(teacher_hidden, teacher.head_matrix, settings.top_k, tau, softcap=teacher_cap, **how)
    student_logp = vocab.logp_at(hidden, head, ids, tau, softcap=cap, **how)
    divergence = tau**2 * vocab.topk_divergence(student_logp, jax.lax.stop_gradient(teacher_logp), settings.remainder)
    return PolicyOutputs(logp, entropy, factor * divergence, load)


def critic_values(model: ValueModel, params: Params, batch: TokenBatch) -> jax.Array:
    """Compute the value of the state before every token, `[B, T]` float32."""
    _, hidden, _ = hidden_before(model.trunk, params["trunk"], without_experts(batch))
    return model.head(params, hidden)
