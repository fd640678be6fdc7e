"""Stages of pipelines with a real model in this process, or behind rolljax's own server."""

import json

import numpy as np
import pytest

from rolljax.data import hidden_states, pipeline, vectors
from rolljax.data.pipeline import Pipeline
from rolljax.errors import ConfigError
from rolljax.model import hf
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a small model with random weights as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("model") / "hf"
    model = Model(Qwen3Config(init_std=0.3))
    hf.save(path, model, model.init(0), byte_tokenizer())
    return path


@pytest.mark.slow
def test_vectors_are_the_means_of_transformers_hidden_states(tmp_path, folder):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    texts = ["a", "the cat sat on the mat", "x" * 100, "cat"]
    found = hidden_states.embedder(str(folder), 80)(texts)
    reference = transformers.AutoModel.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    tokenizer = byte_tokenizer()
    for text, vector in zip(texts, found, strict=True):
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)[:80]])
        with torch.no_grad():
            mean = reference(ids).last_hidden_state[0].float().mean(0).numpy()
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-4)


def test_records_get_vectors_that_other_stages_use(tmp_path, folder):
    texts = ["the cat sat", "completely other words here", "the cat sat", "123 456"]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": t, "i": i}) + "\n" for i, t in enumerate(texts)))
    near = vectors.EmbeddingDedup(vectors.Embedding(vectors="vector"), threshold=0.9999)
    found = pipeline.run(
        Pipeline((hidden_states.HiddenStates(str(folder), batch=3), near)), str(source), tmp_path / "out"
    )
    rows = [json.loads(line) for line in (tmp_path / "out" / "data.jsonl").read_text().splitlines()]
    assert [r["i"] for r in rows] == [0, 1, 3] and len(rows[0]["vector"]) == Qwen3Config().hidden_size
    assert found.stages["02_embedding_dedup"]["dropped"] == {"near_duplicate": 1}
    with pytest.raises(ConfigError, match="no folder of a model"):
        hidden_states.HiddenStates("nowhere")
