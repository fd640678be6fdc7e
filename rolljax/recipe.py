"""A run as a tree of settings. Every default is at its field, here or in the room that owns the setting."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated

from jax.sharding import Mesh

from rolljax.cluster.placement import Remote
from rolljax.envs.base import EnvSpec
from rolljax.envs.pool import PoolConfig
from rolljax.errors import Checked, ConfigError, Range, check_fields
from rolljax.model.decoder import DecoderConfig, Dtype, Remat
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.implementations import Implementation
from rolljax.model.lora import Lora
from rolljax.rewards.base import RewardConfig
from rolljax.rollout import domains as domain_settings
from rolljax.rollout.agents.program import AgentProgram
from rolljax.rollout.domains import DomainSettings
from rolljax.rollout.episodes import RolloutConfig
from rolljax.rollout.filters import FilterConfig
from rolljax.rollout.group_buffer import Admission, Late, TailBatching, favours
from rolljax.rollout.guidance import Guidance
from rolljax.rollout.mixture_rules import MixtureRule
from rolljax.rollout.start_states import ExpertStarts
from rolljax.sampler.settings import SamplerConfig
from rolljax.trackers.base import TrackerConfig
from rolljax.trainer.algorithms.base import Algorithm, Setup
from rolljax.trainer.batch import PackShape, num_rows_bound
from rolljax.trainer.critic import check_previous
from rolljax.trainer.mesh import Colocated, MeshSpec, Split, num_batch_shards
from rolljax.trainer.optimizer import AdamW, Optimizer

ROW_MULTIPLE = 128
"""The length of a row is a multiple of this many tokens, because attention kernels of TPUs require it."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a run that trains with one algorithm."""

    name: str
    """Shown in progress and metrics."""
    algorithm: Algorithm
    """The source of the training data, and the loss."""
    steps: Annotated[int, Range(low=1)]
    """Steps of this phase."""
    prompts_per_step: Annotated[int, Range(low=1)] = 32
    """Tasks of a step."""
    group_size: Annotated[int, Range(low=1)] = 1
    """Trajectories of a task."""
    updates_per_step: Annotated[int, Range(low=1)] = 1
    """Optimizer updates of a step; each takes an equal share of the groups."""
    epochs: Annotated[int, Range(low=1)] = 1
    """Passes over the trajectories of a step."""
    temperature: float = 1.0
    """Sampling temperature, also used for the trainer's log-probs."""
    top_k: Annotated[int, Range(low=0)] = 0
    """Top-k limit of sampling: tokens outside of it are left out."""
    top_p: Annotated[float, Range(above=0, high=1)] = 1.0
    """Top-p limit of sampling: tokens outside of it are left out."""
    min_p: Annotated[float, Range(low=0, below=1)] = 0.0
    """Min-p limit of sampling: tokens below it are left out."""
    async_ratio: Annotated[float, Range(low=0)] = 0.0
    """The staleness bound: most policy versions between the start of a group and its training. 0: every token is of the
    newest policy, and rollouts and training take turns. Above 0 they run at the same time, and up to `(1 + async_ratio)
    x prompts_per_step` groups are in flight or wait. With a fractional ratio, such as 1.5, up to that fraction of a
    step's groups (here half of them) are one version older than the whole number allows."""
    late: Late = "wait"
    """Treatment of a group that would exceed the staleness bound `async_ratio`. wait: the trainer waits until the group
    is complete, so no group exceeds the bound. resample: the group starts again with the newest policy, and the trainer
    then waits for it. drop: the group is never trained, which favours short answers."""
    spare_prompts: Annotated[int, Range(low=0)] = 0
    """Number of groups in flight in excess of the groups that a step needs. The first groups to complete are trained on
    and the rest are cancelled; timing decides which, so such a run cannot be repeated to the bit. If the rest are
    dropped for good, short answers are favoured."""
    spare_siblings: Annotated[int, Range(low=0)] = 0
    """Number of trajectories of a group in excess of `group_size`. The first trajectories to complete are trained on
    and the rest are cancelled; timing decides which, so such a run cannot be repeated to the bit. If the rest are
    dropped for good, short answers are favoured."""
    tail_batching: TailBatching | None = None
    """Alternate short rounds, which do not wait for their slowest prompts, with long rounds of these prompts
    (`group_buffer.TailBatching`)."""
    mixture: MixtureRule | None = None
    """The rule that sets the shares of a mixture's domains (docs/domains.md); None: their weights."""
    start_states: ExpertStarts | None = None
    """Replay an expert's first turns at the start of episodes (`start_states.ExpertStarts`)."""
    guidance: Guidance | None = None
    """Begin trajectories with latent prefixes of `Recipe.prefixes` (`guidance.Guidance`)."""
    optimizer: Optimizer = AdamW()
    """New with every phase."""
    row_len: Annotated[int, Range(low=0)] = 0
    """Tokens of a packed row, which must hold one trajectory. 0: the shortest row that does, a multiple of 128, as
    shown by `--dry_run`."""
    micro_rows: Annotated[int, Range(low=0)] = 0
    """Rows of a micro-batch. 0: a number that suits the devices, as shown by `--dry_run`."""
    eval_every: Annotated[int, Range(low=0)] = 0
    """Steps between evaluations on held-out tasks (0: only at the end of the phase)."""
    stop_at_reward: float | None = None
    """End the phase early once such an evaluation reaches this reward."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.temperature <= 0:
            raise ConfigError(
                "must be positive: with greedy decoding all answers of a group are equal, so advantages are zero",
                setting="Phase.temperature",
                value=self.temperature,
                remedy="set 1.0; greedy evaluation is Evaluation.temperature = 0",
            )
        if self.prompts_per_step % self.updates_per_step:
            raise ConfigError(
                f"does not divide by updates_per_step = {self.updates_per_step}",
                setting="Phase.prompts_per_step",
                value=self.prompts_per_step,
                remedy=f"choose a multiple of {self.updates_per_step}: every update takes an equal number of groups",
            )
        if self.stop_at_reward is not None and not self.eval_every:
            raise ConfigError(
                "is never looked at, because eval_every is 0",
                setting="Phase.stop_at_reward",
                value=self.stop_at_reward,
                remedy="set Phase.eval_every",
            )
        for name in ("async_ratio", "spare_prompts", "spare_siblings", "tail_batching", "start_states"):
            if getattr(self, name) and not self.samples:
                raise ConfigError(
                    f"can have no effect: {type(self.algorithm).__name__} learns from reference answers",
                    setting=f"Phase.{name}",
                    value=getattr(self, name),
                    remedy="leave it out",
                )
        if self.tail_batching and self.spare_siblings:
            raise ConfigError(
                "is what tail_batching does by its eta",
                setting="Phase.spare_siblings",
                value=self.spare_siblings,
                remedy="leave it out",
            )
        self.admission()
        if self.epochs > 1 and not self.algorithm.trains_policy:
            raise ConfigError(
                f"can have no effect: {type(self.algorithm).__name__} does not train the policy",
                setting="Phase.epochs",
                value=self.epochs,
                remedy="set Critic.epochs",
            )

    @property
    def prefix_tok(self) -> int:
        """Tokens of the latent prefix of guided trajectories."""
        return self.guidance.length if self.guidance else 0

    @property
    def samples(self) -> bool:
        """Whether the policy acts in the environments; otherwise the phase learns from the environments' answers."""
        return self.algorithm.source == "sampler"

    @property
    def begins_again(self) -> bool:
        """Return whether cancelled groups start again."""
        return self.late == "resample" or self.tail_batching is not None

    def spares(self, *, kept: bool) -> int:
        """Return the number of siblings that start in excess of `group_size`. kept: the trainer waits for the group."""
        if self.tail_batching is None:
            return self.spare_siblings
        return 0 if kept else math.ceil(self.tail_batching.eta * self.group_size) - self.group_size

    def admission(self, *, in_rounds: bool = False) -> Admission:
        """Return the rules by which the phase starts, trains and drops groups."""
        return Admission(
            self.prompts_per_step,
            self.steps,
            self.async_ratio,
            self.spare_prompts,
            self.late,
            max_replaced=self.algorithm.dynamic_sampling_rounds * self.prompts_per_step,
            tail=self.tail_batching,
            in_rounds=in_rounds,
        )

    def setup(
        self, max_turns: int, *, first: bool = False, environments: tuple[str, ...] = (), truncates: bool = False
    ) -> Setup:
        """Return the settings with which the algorithm is combined.

        first: the phase is the run's first. environments: names of its domains. truncates: the sampling of one of these
        domains leaves tokens out."""
        return Setup(
            group_size=self.group_size,
            updates=self.updates_per_step * self.epochs,
            staleness=math.ceil(self.async_ratio),
            max_turns=max_turns,
            truncated_sampling=truncates or self.top_k > 0 or self.top_p < 1 or self.min_p > 0,
            first_phase=first,
            environments=environments,
        )


@dataclasses.dataclass(frozen=True)
class Evaluation(Checked):
    """Held-out evaluation: one trajectory for each of `tasks` tasks, at `temperature` (0: greedy)."""

    tasks: Annotated[int, Range(low=1)] = 256
    """Number of held-out tasks to evaluate on, with one trajectory each."""
    temperature: Annotated[float, Range(low=0)] = 1.0
    """Sampling temperature of the evaluation; 0 takes the likeliest token."""
    held_out_frac: Annotated[float, Range(above=0, below=1, remedy="0.1 holds out a tenth of the tasks")] = 0.1
    """Share of all tasks, by the hash of their content, that training never sees."""
    pauses_rollouts: bool = False
    """Whether training rollouts send no requests during an evaluation, with `Phase.async_ratio` above 0."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A run: a model, the environment that it learns in, and the phases of its training."""

    env: EnvSpec
    """The source of tasks and rewards."""
    phases: tuple[Phase, ...]
    """Phases of the run in their order, each with its own name."""
    reward: RewardConfig | None = None
    """Rewards of sampled episodes, in place of the environment's (docs/my_model.md)."""
    agent: AgentProgram | None = None
    """A program that plays the episodes and calls the model through an OpenAI-compatible server (docs/agents.md)."""
    model: DecoderConfig | str = Qwen3Config()
    """Shape of a decoder that starts from random weights with a byte tokenizer, or the path of a local Hugging Face
    folder whose config, weights, tokenizer and chat template are used."""
    chat_template: str = ""
    """Path of a file with the chat template to use in place of the folder's; `plain` for a base model: the texts as
    they are (docs/my_model.md). Empty: the folder's own, or its training template where episodes have several turns."""
    dtype: Dtype = "float32"
    """Data type of the computation. Trained parameters are float32 and are cast at every use."""
    remat: Remat = "dots"
    """Activations that the backward pass recomputes: nothing, all of a layer (`full`), all but matmuls (`dots`), all
    but mixed values (`attention`)."""
    attention: Implementation = "auto"
    """The implementation of attention in training (docs/scaling.md)."""
    lora: Lora | None = None
    """Train low-rank adapters and keep the weights of the model unchanged (docs/algorithms.md)."""
    prefixes: str = ""
    """Path of a safetensors file of latent prefixes, for `Phase.guidance`; made by the recipe `palette`."""
    router_aux_coef: float | None = None
    """Coefficient of the load-balancing loss, in place of a folder's config.json (docs/scaling.md)."""
    max_answer_tok: Annotated[int, Range(low=1)] = 16
    """Maximum number of tokens in one answer (one turn)."""
    sampler: SamplerConfig = SamplerConfig()
    """Slots, pages and programs of the engine."""
    mesh: MeshSpec = MeshSpec()
    """The trainer's devices by axis."""
    placement: Colocated | Split | Remote = Colocated()
    """Whether trainer and sampler share devices, have their own (docs/scaling.md), or are separate processes
    (docs/cluster.md)."""
    pool: PoolConfig = PoolConfig()
    """Settings of the environment pool: where environments run."""
    rollout: RolloutConfig = RolloutConfig()
    """Settings for how episodes are conducted."""
    filters: FilterConfig = FilterConfig()
    """Rules that decide which trajectories are trained on."""
    domains: Mapping[str, DomainSettings] = dataclasses.field(default_factory=dict)
    """Settings of single domains of a mixture, by name (docs/domains.md)."""
    evaluation: Evaluation = Evaluation()
    """Settings of the evaluation on held-out tasks."""
    seed: int = 0
    """Random seed of the weights, of the order of tasks and of all sampling."""
    save_every: Annotated[int, Range(low=1)] = 50
    """Steps between checkpoints (one is always saved at the end of a phase and when the run stops on request)."""
    keep_checkpoints: Annotated[int, Range(low=2)] = 2
    """Number of newest checkpoints to keep; at least two, so that a damaged one does not end the run."""
    keep_best: Annotated[int, Range(low=0)] = 0
    """Number of checkpoints to keep in addition: those with the highest held-out rewards (`Phase.eval_every`, and the
    ends of phases). A checkpoint is saved whenever an evaluation is among the best."""
    rollouts_every: Annotated[int, Range(low=1)] = 1
    """Steps between files of rollouts."""
    keep_rollouts: int | None = None
    """Number of newest files to keep (None: all)."""
    wait_s: float = 600.0
    """Longest wait for the groups of a step."""
    trackers: tuple[TrackerConfig, ...] = ()
    """Experiment trackers that also receive the rows of metrics.jsonl (docs/runs.md)."""

    def __post_init__(self) -> None:
        if not self.phases:
            raise ConfigError("is empty", setting="Recipe.phases", value=(), remedy="give at least one @Phase()")
        names = [p.name for p in self.phases]
        if "start" in names:
            raise ConfigError(
                "is taken: records of a run use it for the evaluation before the first phase",
                setting="Phase.name",
                value="start",
                remedy="such as 'warm_start'",
            )
        if len(set(names)) < len(names):
            raise ConfigError(
                "are not all different", setting="Phase.name", value=names, remedy="give each its own name"
            )
        check_fields(self)
        if self.keep_rollouts is not None and self.keep_rollouts < 1:
            few = "to write few of them, raise Recipe.rollouts_every"
            raise ConfigError(
                "must be at least 1, or None for all",
                setting="Recipe.keep_rollouts",
                value=self.keep_rollouts,
                remedy=few,
            )
        if self.max_answer_tok >= self.sampler.max_context:
            raise ConfigError(
                f"leaves no room for a prompt in a context of {self.sampler.max_context} tokens",
                setting="Recipe.max_answer_tok",
                value=self.max_answer_tok,
                remedy="lower it, or raise SamplerConfig.max_context",
            )
        for phase in self.phases:
            shortest = self.shortest_row(phase)
            if 0 < phase.row_len < shortest:
                longest = f"trajectory (SamplerConfig.max_context = {self.sampler.max_context})"
                pair = "pair of answers with its prompt, which must be in one row"
                raise ConfigError(
                    f"is shorter than the longest {pair if phase.algorithm.unsplit_groups else longest}",
                    setting="Phase.row_len",
                    value=phase.row_len,
                    remedy=f"set it to {shortest} or more, or leave it out",
                )
            if phase.start_states and self.max_turns == 1:
                raise ConfigError(
                    "can have no effect: episodes of this environment have one turn",
                    setting="Phase.start_states",
                    value=phase.start_states,
                    remedy="leave it out, or choose an environment with several turns",
                )
            if _compares_wholes(phase.algorithm) and self.rollout.max_restarts:
                raise ConfigError(
                    f"is not possible: {type(phase.algorithm).__name__} compares trajectories, each of one sequence",
                    setting="RolloutConfig.context",
                    value=self.rollout.context,
                    remedy="set 'truncate'",
                )
        alone = self.agent is not None and self.env.specs == {self.env.name: self.env}
        if any(spec.program for spec in self.env.specs.values()) and not alone:
            raise ConfigError(
                f"is played by a program that the environment brings: {self.env.name}",
                setting="Recipe.env",
                remedy="Recipe.agent = @AgentProgram(), AgentProgram.sandbox = 'none'; in no mixture",
            )
        if self.agent:
            self._check_agent(self.agent)
        self._check_guidance()
        domain_settings.check(self.env, self.domains, self.phases, self.max_answer_tok, agent=self.agent is not None)
        self.warnings()
        for before, phase in zip((None, *self.phases), self.phases, strict=False):
            _check_overlong(phase.algorithm, self.max_answer_tok)
            check_previous(before.algorithm.needs().critics if before else None, phase.algorithm.needs().critics)

    def _check_agent(self, agent: AgentProgram) -> None:
        """Raise `ConfigError` for settings that have no effect with an agent program or cannot work with one."""
        if dataclasses.replace(self.rollout, retries=RolloutConfig.retries) != RolloutConfig():
            raise ConfigError(
                "can have no effect but for `retries`: the agent program conducts its episodes",
                setting="Recipe.rollout",
                value=self.rollout,
                remedy="leave it out; AgentProgram has max_calls, max_restarts and deadline_s",
            )
        agent.for_env(self.env)
        outside = [name for name, spec in self.env.specs.items() if not spec.has_sandbox]
        if agent.sandbox == "task" and outside:
            raise ConfigError(
                f"needs an environment whose episodes have a sandbox, and {outside[0]} has none",
                setting="AgentProgram.sandbox",
                value=agent.sandbox,
                remedy="choose TerminalTasks, HarborTasks or your own with EnvSpec.has_sandbox; or set 'none'",
            )
        if agent.sandbox == "task" and self.pool.where == "ray":
            raise ConfigError(
                "cannot be combined with AgentProgram.sandbox = 'task': the policy's server is open on this host only, "
                "and an actor may be on another",
                setting="PoolConfig.where",
                value=self.pool.where,
                remedy="'thread' or 'process'",
            )
        for phase in self.phases:
            if phase.start_states and phase.samples:
                raise ConfigError(
                    "cannot replay turns to an agent program", setting="Phase.start_states", remedy="leave it out"
                )
            if _compares_wholes(phase.algorithm) and agent.max_restarts:
                raise ConfigError(
                    f"must be 0: {type(phase.algorithm).__name__} compares trajectories, each of one sequence",
                    setting="AgentProgram.max_restarts",
                    value=agent.max_restarts,
                )

    def _check_guidance(self) -> None:
        """Raise `ConfigError` for latent prefixes that cannot work."""
        for phase in (phase for phase in self.phases if phase.guidance):
            problem, remedy, name = "", "leave it out", type(phase.algorithm).__name__
            if not self.prefixes:
                problem = "needs the latent prefixes of a file, and Recipe.prefixes names none"
                remedy = "set Recipe.prefixes (recipe palette makes such files), or leave it out"
            elif self.agent and phase.samples:
                problem = "is not possible with an agent program, which makes its prompts itself"
            elif phase.algorithm.unsplit_groups:
                problem = f"is not possible: {name} compares trajectories of one prompt, and prefixes differ"
            elif phase.algorithm.matches_contexts:
                problem = f"is not possible: {name} compares turns of one context, and prefixes differ"
            if problem:
                raise ConfigError(problem, setting="Phase.guidance", value=phase.guidance, remedy=remedy)

    @property
    def max_turns(self) -> int:
        """Most answers of the model in one episode."""
        return max(self.env.max_turns, self.agent.max_calls if self.agent else 1)

    @property
    def max_restarts(self) -> int:
        """The most restarts of a trajectory's stream."""
        return self.agent.max_restarts if self.agent else self.rollout.max_restarts

    def warnings(self) -> list[str]:
        """Return a sentence for each setting that may be a mistake; raise `ConfigError` for one that cannot work."""
        names, truncates = tuple(self.env.specs), any(own.truncates for own in self.domains.values())
        said = [
            f"phase {p.name}: {text}"
            for i, p in enumerate(self.phases)
            for text in p.algorithm.check(
                p.setup(self.max_turns, first=i == 0, environments=names, truncates=truncates and p.samples)
            )
        ]
        said += [f"phase {p.name}: {text}" for p in self.phases for text in favours(p.spare_siblings, p.late)]
        return [*self.env.warnings(), *said]

    def _lengths(self, phase: Phase) -> tuple[int, int, int]:
        """Return, in the worst case: siblings that must be in one row, tokens of their prompt, tokens of a response."""
        context = self.sampler.max_context
        response = self.max_answer_tok if self.max_turns == 1 else context - 1
        if phase.prefix_tok:  # siblings with different prefixes share no prompt
            response = context
        return 2 if phase.algorithm.unsplit_groups else 1, context - response, response

    def shortest_row(self, phase: Phase) -> int:
        """Return the tokens of the longest trajectory, or of the longest pair with its prompt, which needs one row."""
        size, prompt, response = self._lengths(phase)
        if phase.algorithm.needs().context == "solved_sibling":  # a whole conversation before each
            return 2 * (prompt + response)
        return prompt + size * response

    def pack_shape(self, phase: Phase) -> PackShape:
        """Return the fixed shape of the batches of a `sized` phase: it has room for the longest possible answers."""
        size, prompt, response = self._lengths(phase)
        unsplit = phase.algorithm.unsplit_groups
        rows = num_rows_bound(
            phase.prompts_per_step // phase.updates_per_step,
            size if unsplit else phase.group_size + (phase.start_states is not None and phase.algorithm.imitates),
            prompt,
            response,
            phase.row_len,
            unsplit_groups=unsplit,
            restarts=self.max_restarts,
        )
        return PackShape(-(-rows // phase.micro_rows), phase.micro_rows, phase.row_len)

    @property
    def in_this_process(self) -> Recipe:
        """The recipe with its sampler in this process, if the run has samplers in others."""
        return dataclasses.replace(self, placement=Colocated()) if isinstance(self.placement, Remote) else self

    def sized(self, mesh: Mesh, micro_tok: int) -> Recipe:
        """Return the recipe with a number for `row_len` and `micro_rows` of every phase.

        Args:
          micro_tok: tokens of a micro-batch of phases that leave `micro_rows` at 0.
        """
        shards, multiple = num_batch_shards(mesh), ROW_MULTIPLE * mesh.shape["context"]

        def of(phase: Phase) -> Phase:
            row_len = phase.row_len or -(-self.shortest_row(phase) // multiple) * multiple
            least = dataclasses.replace(phase, row_len=row_len, micro_rows=shards)
            fit, needed = micro_tok // row_len // shards, self.pack_shape(least).num_micro
            return dataclasses.replace(least, micro_rows=phase.micro_rows or shards * max(1, min(fit, needed)))

        return dataclasses.replace(self, phases=tuple(map(of, self.phases)))

    def check_rates(self) -> None:
        """Raise `ConfigError` if a model from a folder is trained and no learning rate was set."""
        if not isinstance(self.model, str):
            return
        for phase in self.phases:
            if phase.algorithm.trains_policy:
                phase.optimizer.check_rate(self.model)
            critic = phase.algorithm.needs().critics
            if critic is not None and not isinstance(critic.model, DecoderConfig):
                critic.optimizer.check_rate(self.model)

    def check_mesh(self, mesh: Mesh) -> None:
        """Raise `ConfigError` if rows do not divide over the batch shards of a mesh, or their tokens over `context`."""
        shards, parts = num_batch_shards(mesh), mesh.shape["context"]
        for phase in self.phases:
            if phase.micro_rows % shards:
                raise ConfigError(
                    f"does not divide over {shards} batch shards of the mesh",
                    setting="Phase.micro_rows",
                    value=phase.micro_rows,
                    remedy=f"choose a multiple of {shards}",
                )
            if phase.row_len % parts:
                raise ConfigError(
                    f"does not divide by MeshSpec.context = {parts}",
                    setting="Phase.row_len",
                    value=phase.row_len,
                    remedy=f"choose a multiple of {parts}; on TPU of {128 * parts}, for the attention kernels",
                )


def _compares_wholes(algorithm: Algorithm) -> bool:
    """Return whether every trajectory must be one sequence."""
    return algorithm.unsplit_groups or algorithm.needs().context is not None


def _check_overlong(algorithm: Algorithm, max_answer_tok: int) -> None:
    cache = algorithm.overlong_cache
    if cache > max_answer_tok:
        raise ConfigError(
            f"is more than an answer can be long (Recipe.max_answer_tok = {max_answer_tok})",
            setting="RewardShaping.overlong_cache",
            value=cache,
            remedy=f"at most {max_answer_tok}; a fifth of it is usual",
        )
