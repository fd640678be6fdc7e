"""The bodies of Tinker's API: requests to examples and settings, results to bytes.

The SDK's own package `tinker` defines the messages (protobuf and pydantic), so that server and clients agree. What is
checked here names the field and the remedy: the client shows it as it is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import pydantic
import zstandard
from google.protobuf.message import DecodeError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from rolljax import reading
from rolljax.errors import RolljaxError
from rolljax.trainer.slots import LOSSES, Adam, Example, LossOutput, LossSettings
from rolljax.types import Completion

T = TypeVar("T", bound=pydantic.BaseModel)
DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
INPUTS = {"logprobs": "sampler_logp", "advantages": "advantages"}
"""Inputs of the losses but cross-entropy, and their fields of `Example`."""
SETTINGS = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high", "beta": "beta"}
"""`loss_fn_config`, and its fields of `LossSettings`."""
MAX_TARGETS = 64
"""Most target tokens of one position."""
NO_TOKEN = (0, -99999.0)
"""Id and log-prob of an empty cell in a table of likely tokens."""


class RequestError(RolljaxError, ValueError):
    """A request that cannot be answered; its text is for the client. status: of the HTTP answer."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(frozen=True, eq=False)
class LossCall:
    """A call of `forward_backward`."""

    model_id: str
    seq_id: int
    examples: tuple[Example, ...]
    """Slot 0; the policy's own slot is known when they are computed."""
    vectors: tuple[bool, ...]
    """Of each example: whether its target tokens are a vector, and its log-probs are to be one."""
    backward: bool


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes that requests are checked against."""

    vocab_size: int
    max_context: int


def unpacked(body: bytes, encoding: str, most: int) -> bytes:
    """Return a body without its `Content-Encoding`, at most `most` bytes."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise RequestError(f"Content-Encoding {encoding!r} is not known: send zstd, or none", 415)
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            plain: bytes = reader.read(most + 1)
    except zstandard.ZstdError as e:
        raise RequestError(f"the body is not zstd: {e}") from None
    if len(plain) > most:
        raise RequestError(f"the body is more than {most} bytes without its compression", 413)
    return plain


def read_json(body: bytes, kind: type[T]) -> T:
    """Return a JSON body as one of the SDK's request types."""
    try:
        return kind.model_validate(reading.parse(body))
    except pydantic.ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"{where or 'the body'}: {first['msg']}") from None
    except ValueError as e:
        raise RequestError(f"the body is not JSON: {e}") from None


# ---- losses ---------------------------------------------------------------------------------------------------------


def read_loss_call(body: bytes, limits: Limits) -> LossCall:
    """Return the call that the protobuf body of `forward_backward` holds."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as e:
        raise RequestError(f"the body is no ForwardBackwardRequest: {e}") from None
    if message.loss_fn not in LOSSES:
        raise RequestError(
            f"loss_fn: {message.loss_fn!r} is not offered. Offered are {', '.join(LOSSES)}; forward_backward_custom "
            "computes any other loss in the client"
        )
    if not message.data:
        raise RequestError("data: is empty")
    settings = _loss_settings(message)
    read = [_example(f"data[{i}]", datum, message.loss_fn, settings, limits) for i, datum in enumerate(message.data)]
    vectors = tuple(len(datum.loss_fn_inputs["target_tokens"].shape) < 2 for datum in message.data)
    return LossCall(message.model_id, message.seq_id, tuple(read), vectors, not message.forward_only)


def _loss_settings(message: Any) -> LossSettings:
    given = {name: float(value) for name, value in message.loss_fn_config.items()}
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise RequestError(f"loss_fn_config.{name}: must be a number")
        given[name] = value.number
    for name, value in given.items():
        if name not in SETTINGS:
            raise RequestError(f"loss_fn_config.{name}: is not known; known are {', '.join(SETTINGS)}")
        if not math.isfinite(value) or value < 0:
            raise RequestError(f"loss_fn_config.{name}: must be a number, not negative, got {value}")
    return LossSettings(**{SETTINGS[name]: value for name, value in given.items()})


def _example(place: str, datum: Any, loss: Any, settings: LossSettings, limits: Limits) -> Example:
    tokens = _tokens(f"{place}.model_input", datum.model_input, limits)
    inputs = dict(datum.loss_fn_inputs)
    where = f"{place}.loss_fn_inputs"
    if "target_tokens" not in inputs:
        raise RequestError(f"{where}: target_tokens is missing")
    targets = _matrix(f"{where}.target_tokens", inputs.pop("target_tokens"), len(tokens))
    if targets.min() < 0 or targets.max() >= limits.vocab_size:
        raise RequestError(f"{where}.target_tokens: ids must lie between 0 and {limits.vocab_size - 1}")
    arrays: dict[str, np.ndarray] = {"weights": np.ones(targets.shape)}
    names = {"weights": "weights"} | ({} if loss == "cross_entropy" else INPUTS)
    if unknown := inputs.keys() - names.keys():
        raise RequestError(f"{where}: {loss} takes no {min(unknown)}; it takes target_tokens, {', '.join(names)}")
    for name, field in names.items():
        if name in inputs:
            arrays[field] = _matrix(f"{where}.{name}", inputs[name], len(tokens))
            if arrays[field].shape != targets.shape:
                raise RequestError(
                    f"{where}.{name}: its shape {arrays[field].shape} is not that of target_tokens, {targets.shape}"
                )
        elif field not in arrays:
            raise RequestError(f"{where}: {loss} needs {name}")
    floats = {name: array.astype(np.float32) for name, array in arrays.items()}
    return Example(0, loss, tokens, targets.astype(np.int32), settings=settings, **floats)


def _tokens(place: str, chunks: Any, limits: Limits) -> np.ndarray:
    """Return the tokens of the chunks of a prompt, int32."""
    parts = []
    for chunk in chunks:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise RequestError(f"{place}: images and audio are not offered, only text")
        data = chunk.encoded_text.tokens
        if len(data) % 4:
            raise RequestError(f"{place}: tokens must be int32")
        parts.append(np.frombuffer(data, np.int32))
    return checked_tokens(place, np.concatenate([np.zeros(0, np.int32), *parts]), limits.max_context, limits)


def checked_tokens(place: str, tokens: np.ndarray, most: int, limits: Limits) -> np.ndarray:
    """Return tokens if there are some, at most `most`, and the model knows them."""
    if not 0 < len(tokens) <= most:
        raise RequestError(f"{place}: must have 1 to {most} tokens, got {len(tokens)}")
    if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
        raise RequestError(f"{place}: ids must lie between 0 and {limits.vocab_size - 1}")
    return tokens


def _matrix(place: str, tensor: Any, rows: int) -> np.ndarray:
    """Return a tensor of the wire with one row for each token, `[rows, K]`; a sparse one with zeros."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise RequestError(f"{place}: must be float32, int32 or int64")
    shape = tuple(tensor.shape)
    fits = not shape or (len(shape) in (1, 2) and shape[0] == rows and 1 <= (*shape, 1)[1] <= MAX_TARGETS)
    if not fits:
        raise RequestError(
            f"{place}: must have one row for each of the {rows} tokens, of at most {MAX_TARGETS} numbers, got {shape}"
        )
    try:
        if tensor.HasField("sparse_csr"):
            full = _dense(tensor.sparse_csr, dtype, shape)
        else:
            full = np.frombuffer(tensor.dense, dtype)
        matrix = full.reshape(shape or (rows,)).reshape(rows, -1)
    except ValueError as e:
        raise RequestError(f"{place}: its bytes do not fit its shape {shape or (rows,)}: {e}") from None
    if not np.isfinite(matrix).all():
        raise RequestError(f"{place}: holds numbers that are not finite")
    return matrix


def _dense(sparse: Any, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    values: np.ndarray = np.frombuffer(sparse.values, dtype)
    starts, columns = (np.frombuffer(x, np.int64) for x in (sparse.crow_indices, sparse.col_indices))
    fits = len(shape) == 2 and len(starts) == shape[0] + 1 and len(values) == len(columns)
    fits = fits and starts[0] == 0 and starts[-1] == len(values) and bool((np.diff(starts) >= 0).all())
    if not fits or (len(columns) and (columns.min() < 0 or columns.max() >= shape[1])):
        raise ValueError("the indices are not those of a sparse matrix")
    full: np.ndarray = np.zeros(shape, dtype)
    full[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return full


def loss_result(call: LossCall, outputs: Sequence[LossOutput]) -> bytes:
    """Return the protobuf of the outputs of a call's examples."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics["loss:sum"] = math.fsum(out.loss for out in outputs)
    shapes = [() if is_vector else out.logp.shape[1:] for is_vector, out in zip(call.vectors, outputs, strict=True)]
    for shape, same in itertools.groupby(zip(shapes, outputs, strict=True), key=lambda pair: pair[0]):
        arrays = [np.ascontiguousarray(out.logp, np.float32) for _, out in same]
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        tensor = record.fields["logprobs"]
        tensor.data = b"".join(x.tobytes() for x in arrays)
        tensor.offsets = np.cumsum([0, *(x.nbytes for x in arrays)], dtype=np.int64).tobytes()
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.trailing_shape.extend(shape)
    return bytes(message.SerializeToString())


def read_adam(params: Any) -> Adam:
    """Return the settings of an optimizer step."""
    if not isinstance(params, types.AdamParams):
        raise RequestError("optim_params: only AdamParams are offered")
    given = Adam(
        params.learning_rate, params.beta1, params.beta2, params.eps, params.weight_decay, params.grad_clip_norm
    )
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if not (math.isfinite(value) and value >= 0 and (value < 1 or not field.name.startswith("beta"))):
            raise RequestError(f"optim_params.{field.name}: {value} is no value for it")
    return given


# ---- samples --------------------------------------------------------------------------------------------------------


def prompt_tokens(prompt: types.ModelInput, most: int, limits: Limits) -> np.ndarray:
    """Return the tokens of a JSON prompt, int32."""
    try:
        tokens = np.array(prompt.to_ints(), np.int64)
    except (ValueError, OverflowError) as e:
        raise RequestError(f"prompt: {e}") from None
    return checked_tokens("prompt", tokens, most, limits).astype(np.int32)


def sample_result(
    completions: Sequence[Completion],
    top: int,
    prompt_logp: np.ndarray | None,
    prompt_top: tuple[np.ndarray, np.ndarray] | None,
) -> bytes:
    """Return the protobuf of samples.

    Args:
      top: likely tokens to report for each sampled token. prompt_logp: `[P]`.
      prompt_top: ids and log-probs `[P, k]` of likely tokens in place of those of the prompt.
    """
    message = pb.SampleResponse()
    for done in completions:
        sampled = done.sampled
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if done.finish_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=sampled.tokens.astype(np.int32).tobytes(),
            logprobs=sampled.model_logp.astype(np.float32).tobytes(),
        )
        if top:
            sequence.topk_sampled_logprobs.CopyFrom(_likely(sampled.top_ids, sampled.top_model_logp))
    if prompt_logp is not None:
        message.prompt_logprobs = prompt_logp.astype(np.float32).tobytes()
    if prompt_top is not None:
        message.topk_prompt_logprobs.CopyFrom(_likely(*prompt_top))
    message.prompt_cache_hit_tokens = min(done.cached_tok for done in completions)
    return bytes(message.SerializeToString())


def _likely(ids: np.ndarray, logp: np.ndarray) -> Any:
    is_known = np.isfinite(logp)
    ids, logp = np.where(is_known, ids, NO_TOKEN[0]), np.where(is_known, logp, NO_TOKEN[1])
    table = (ids.astype(np.int32).tobytes(), logp.astype(np.float32).tobytes())
    return pb.TopkLogprobs(token_ids=table[0], logprobs=table[1], k=ids.shape[1], length=len(ids))
