"""Files of data: the same rows in every format, the roles of columns, and errors for ambiguous columns."""

import gzip
import json
import random
import shutil
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.envs.data import rows
from rolljax.envs.data.columns import Columns, Role, find, need, value
from rolljax.envs.data.rows import BadRow, find_files, open_rows
from rolljax.envs.questions import Questions
from rolljax.envs.records import Records
from rolljax.errors import ConfigError, DataError
from rolljax.types import Message

ROWS = [{"question": f"{i}+{i}?", "answer": str(2 * i), "about": {"index": i, "tags": ["a", "b"]}} for i in range(7)]


def as_lines(path, rows=ROWS):
    path.write_text("\n".join(json.dumps(row) + "\n" for row in rows))


def as_packed_lines(path):
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))


def as_array(path):
    path.write_text("\n " + json.dumps(ROWS, indent=2))


def as_packed_array(path):
    path.write_bytes(gzip.compress(json.dumps(ROWS).encode()))


def as_parquet(path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=3)


def as_shards(path):
    path.mkdir()
    (path / "README.md").write_text("about")
    for i, part in enumerate((ROWS[:3], ROWS[3:4], ROWS[4:])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), path / f"train-0000{i}-of-00003.parquet")


def as_arrow_file(path):
    with pyarrow.ipc.new_file(path, pyarrow.Table.from_pylist(ROWS).schema) as file:
        file.write_table(pyarrow.Table.from_pylist(ROWS), max_chunksize=2)


def as_saved(path):
    datasets.Dataset.from_list(ROWS).save_to_disk(path, num_shards=2)


def as_saved_with_a_selection(path):
    datasets.Dataset.from_list([*reversed(ROWS), *ROWS]).select(range(len(ROWS), 2 * len(ROWS))).save_to_disk(path)


def as_saved_dict(path):
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(path)


FORMATS = [as_lines, as_packed_lines, as_array, as_packed_array, as_parquet, as_shards, as_arrow_file, as_saved]
FORMATS += [as_saved_with_a_selection, as_saved_dict]


@pytest.mark.parametrize("write", FORMATS, ids=lambda f: f.__name__[3:])
def test_the_same_rows_in_every_format(tmp_path, write):
    path = tmp_path / "data"
    write(path)
    rows = open_rows(find_files(str(path), "Records.path"))
    assert [rows.row(i) for i in range(len(rows))] == ROWS
    spec = Questions(str(path))
    assert [spec.question(i).answer for i in range(8)] == ["0", "2", "4", "6", "8", "10", "12", "0"]
    assert spec.record(9) == ROWS[2] and str(tmp_path) in spec.location(9)


def test_a_pattern_names_files_in_order(tmp_path):
    for i in (2, 0, 1):
        as_lines(tmp_path / f"part{i}.jsonl", ROWS[i : i + 1])
    rows = open_rows(find_files(str(tmp_path / "part*.jsonl"), "Records.path"))
    assert [rows.row(i) for i in range(3)] == ROWS[:3]
    assert rows.location(2) == f"{tmp_path / 'part2.jsonl'}, line 1"
    with pytest.raises(ConfigError, match="matches no file"):
        find_files(str(tmp_path / "none*.jsonl"), "Records.path")


def test_splits_are_not_mixed(tmp_path):
    as_lines(tmp_path / "train.jsonl")
    as_lines(tmp_path / "test.jsonl")
    with pytest.raises(ConfigError, match=r"several splits \(test, train\)") as e:
        Questions(str(tmp_path))
    assert e.value.setting == "Questions.path" and "train.jsonl" in e.value.remedy
    both = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS))
    both.save_to_disk(tmp_path / "saved")
    with pytest.raises(ConfigError, match="several splits") as e:
        Records(str(tmp_path / "saved"))
    assert str(tmp_path / "saved" / "train") in e.value.remedy


def test_files_that_cannot_be_read(tmp_path):
    for name, content in {
        "empty": b"\n \n",
        "array": b'[{"a": 1}',
        "cut.parquet": b"PAR1 and so on",
        "cut.gz": gzip.compress(b"x" * 100_000)[:50],
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=name):
            open_rows(find_files(str(tmp_path / name), "Records.path"))
    (tmp_path / "all" / "data").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds no data files") as e:
        find_files(str(tmp_path / "all"), "Records.path")
    assert str(tmp_path / "all" / "data") in e.value.remedy


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    as_parquet(tmp_path / "data.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="needs the package pyarrow") as e:
        open_rows([tmp_path / "data.parquet"])
    assert "rolljax[data]" in e.value.remedy


# ---- files that unpack to more than they should ---------------------------------------------------------------------

MIB = 2**20


@pytest.fixture
def small_limits(monkeypatch):
    """Set the limits on sizes low enough to be exceeded at once."""
    for name, limit in (("SMALL_BYTES", MIB), ("MAX_RATIO", 2), ("MAX_ROW_BYTES", 4096), ("MAX_ROWS", 100_000)):
        monkeypatch.setattr(rows, name, limit)


def constant_columns(path, num, text="x"):
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * num, pyarrow.int32()), pyarrow.array([text]))
    pyarrow.parquet.write_table(pyarrow.table({"question": column, "answer": pyarrow.array([7] * num)}), path)


def test_a_packed_file_that_unpacks_to_too_much_is_refused(tmp_path, small_limits):
    line = json.dumps({"question": "x" * 1000, "answer": "7"}) + "\n"
    for name, content in (("lines.jsonl.gz", line * 2000), ("array.json.gz", "[" + ",".join([line] * 2000) + "]")):
        (tmp_path / name).write_bytes(gzip.compress(content.encode()))
        with pytest.raises(DataError, match=f"{name} unpacks to more than 1,048,576 bytes") as e:
            open_rows([tmp_path / name])
        assert "unpack it yourself" in str(e.value)
    numbers = random.Random(0)
    rest = "".join(json.dumps({"question": numbers.randbytes(1000).hex(), "answer": "7"}) + "\n" for _ in range(1000))
    (tmp_path / "honest.jsonl.gz").write_bytes(gzip.compress(rest.encode()))
    assert len(open_rows([tmp_path / "honest.jsonl.gz"])) == 1000


def test_a_packed_file_does_not_fill_the_disk(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"question": "?", "answer": "7"}\n' * 10_000))
    monkeypatch.setattr(rows.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**6, 9 * 10**5, 10**5))
    with pytest.raises(DataError, match="more than half of the 100,000 bytes that are free") as e:
        open_rows([tmp_path / "a.jsonl.gz"])
    assert "TMPDIR" in str(e.value)


def test_constant_columns_of_parquet_take_the_memory_of_one_value(tmp_path):
    """Two gibibytes of text when every row is written out."""
    constant_columns(tmp_path / "a.parquet", 20_000, "x" * 100_000)
    before = pyarrow.total_allocated_bytes()
    found = open_rows([tmp_path / "a.parquet"])
    assert pyarrow.total_allocated_bytes() - before < 8 * MIB
    assert len(found) == 20_000 and found.row(19_999) == {"question": "x" * 100_000, "answer": 7}


def test_texts_inside_of_lists_that_parquet_stores_in_two_ways(tmp_path):
    """A writer's dictionary of texts has an end: what comes behind it is stored as it is."""
    numbers = random.Random(0)
    given = [{"messages": [{"role": "user", "content": numbers.randbytes(50).hex()}], "i": i} for i in range(500)]
    table = pyarrow.Table.from_pylist(given)
    pyarrow.parquet.write_table(table, tmp_path / "a", row_group_size=200, dictionary_pagesize_limit=4096)
    found = open_rows([tmp_path / "a"])
    assert [found.row(i) for i in range(len(found))] == given


def test_parquet_and_arrow_that_unpack_to_too_much_are_refused(tmp_path, small_limits):
    constant_columns(tmp_path / "rows.parquet", 100_001)
    with pytest.raises(DataError, match=r"rows\.parquet has more than 100,000 rows"):
        open_rows([tmp_path / "rows.parquet"])
    many = pyarrow.table({"question": ["?"], "answer": pyarrow.array([[0] * 500_000], pyarrow.list_(pyarrow.int64()))})
    pyarrow.parquet.write_table(many, tmp_path / "values.parquet")
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_file(tmp_path / "packed.arrow", many.schema, options=options) as file:
        file.write_table(many)
    with pyarrow.ipc.new_stream(tmp_path / "stream.arrow", many.schema, options=options) as file:
        file.write_table(many)
    before = pyarrow.total_allocated_bytes()
    for name in ("values.parquet", "packed.arrow", "stream.arrow"):
        with pytest.raises(DataError, match=f"{name} unpacks to .* bytes, more than 1,048,576"):
            open_rows([tmp_path / name])
    assert pyarrow.total_allocated_bytes() - before < MIB


@pytest.mark.parametrize("codec", ["lz4", "zstd", None])
def test_packed_arrow_that_is_honest_is_read(tmp_path, codec):
    """With and without a dictionary, which is a message of its own."""
    table = pyarrow.Table.from_pylist(ROWS)
    encoded = table.set_column(0, "question", table["question"].dictionary_encode())
    for i, rows_of in enumerate((table, encoded)):
        for new in (pyarrow.ipc.new_file, pyarrow.ipc.new_stream):
            path = tmp_path / f"{i}{new.__name__}.arrow"
            with new(path, rows_of.schema, options=pyarrow.ipc.IpcWriteOptions(compression=codec)) as file:
                file.write_table(rows_of, max_chunksize=3)
            found = open_rows([path])
            assert [found.row(i) for i in range(len(found))] == ROWS


@pytest.mark.parametrize("name", ["lines.jsonl", "long.parquet", "list.parquet"])
def test_a_row_that_is_too_long_is_a_bad_row(tmp_path, small_limits, name):
    path, answer = tmp_path / name, ["7"] if name.startswith("list") else "7"
    rows = [{"question": "1+1?", "answer": answer}, {"question": "x" * 5000, "answer": answer}]
    if name.startswith("list"):
        rows[1] = {"question": "?", "answer": ["7"] * 5000}
    if name.endswith("jsonl"):
        as_lines(path, rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(DataError, match="has [0-9,]+ bytes; a row has at most 4,096"):
        Questions(str(path)).task(0)
    assert Questions(str(path), bad_rows="skip").num_questions == 1


def test_an_array_is_read_row_by_row(tmp_path, monkeypatch):
    """In windows of a few bytes, whose ends fall everywhere: inside of numbers, escapes and characters."""
    monkeypatch.setattr(rows, "_BLOCK", 7)
    path = tmp_path / "a.json"
    given = [{"a": '\u00e9\U0001f600\\" ]', "b": [1, {"c": 12345678901}]}, {"a": "x" * 100}, {}, {"a": None}]
    for text in (json.dumps(given), json.dumps(given, ensure_ascii=False, indent=3), "[]", " [ ] \n"):
        path.write_text(text)
        if "{" not in text:
            with pytest.raises(DataError, match="holds no rows"):
                open_rows([path])
            continue
        found = open_rows([path])
        assert [found.row(i) for i in range(len(found))] == given and found.location(2) == f"{path}, row 2"
    for text, why in {
        '[{"a": 1} {"a": 2}]': r"row 1: '\]' expected, not '\{'", '[{"a": 1},]': "row 1: Expecting value", '[{"a": 1}': "ends without",
        '[{"a": 1}] x': "text follows its end", '[{"a": "\\x"}]': "row 0: Invalid .escape", "[123": "ends without", "[nul": "row 0",
    }.items():  # fmt: skip
        path.write_text(text)
        with pytest.raises(DataError, match=why):
            open_rows([path])
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 50)
    path.write_text(json.dumps(given[1:2] + given))
    with pytest.raises(DataError, match="row 0: it is not JSON, or has more than 50 bytes"):
        open_rows([path])


# ---- columns --------------------------------------------------------------------------------------------------------

ASKED = Role("Questions.prompt_key", "", (("prompt", "question"), ("messages",)))


def columns(tmp_path, *rows):
    as_lines(tmp_path / "data.jsonl", rows)
    return Columns.of(open_rows([tmp_path / "data.jsonl"]))


def test_columns_reach_into_objects_and_their_json_text(tmp_path):
    row = {"reward_model": {"ground_truth": "34", "style": "rule"}, "extra_info": '{"index": 5}', "a.b": 1}
    found = columns(tmp_path, row)
    assert set(found.every) == {
        "reward_model", "reward_model.ground_truth", "reward_model.style", "extra_info", "extra_info.index", "a.b"
    }  # fmt: skip
    for key, want in (("reward_model.ground_truth", "34"), ("extra_info.index", 5), ("a.b", 1)):
        assert value(row, key) == want
    for key in ("reward_model.none", "extra_info.index.deep", "a", ""):
        with pytest.raises(BadRow, match="lacks"):
            value(row, key)


def test_usual_names_are_found_in_tiers(tmp_path):
    assert need(ASKED, columns(tmp_path, {"Question": "?", "messages": []}), "f") == "Question"
    assert need(ASKED, columns(tmp_path, {"text": "?", "messages": []}), "f") == "messages"
    assert find(ASKED, columns(tmp_path, {"text": "?", "question": None}), "f") is None
    # a stray key in one row of many is no column
    rows = [{"question": "?"}] * 3 + [{"question": "?", "prompt": "?"}]
    assert need(ASKED, columns(tmp_path, *rows), "f") == "question"


def test_what_cannot_be_told_names_the_columns_and_the_setting(tmp_path):
    two = columns(tmp_path, {"prompt": "?", "question": "?", "id": 1})
    with pytest.raises(ConfigError, match="more than one column it could be: 'prompt' and 'question'") as e:
        need(ASKED, two, "f.jsonl")
    assert e.value.setting == "Questions.prompt_key"
    assert "Questions.prompt_key = 'question'" in e.value.remedy and "prompt, question, id" in e.value.remedy
    none = columns(tmp_path, {"task": "?", "id": 1})
    with pytest.raises(ConfigError, match="none of the usual columns") as e:
        need(ASKED, none, "f.jsonl")
    assert "one of its columns: task, id" in e.value.remedy
    with pytest.raises(ConfigError, match=r"is no column of f\.jsonl") as e:
        need(Role("Questions.prompt_key", "tusk", ()), none, "f.jsonl")
    assert "did you mean 'task'?" in e.value.remedy
    assert need(Role("Questions.prompt_key", "task", ()), none, "f.jsonl") == "task"


# ---- bad rows -------------------------------------------------------------------------------------------------------


def test_bad_rows_are_named_or_left_out_aloud(tmp_path):
    path = tmp_path / "data.jsonl"
    good = json.dumps({"question": "1+1?", "answer": "2"})
    path.write_text("\n".join([good, "", "nonsense", good, '{"question": "?"}', *["[]"] * 5, good]) + "\n")
    with pytest.raises(DataError) as e:
        Questions(str(path)).task(0)
    text = str(e.value)
    assert "7 of 10 rows cannot be used" in text and "and 2 more" in text and "Questions.bad_rows = 'skip'" in text
    assert f"{path}, line 3: is not JSON" in text and f"{path}, line 5: lacks 'answer'; it has question" in text
    spec = Questions(str(path), bad_rows="skip")
    (said,) = spec.warnings()
    assert spec.num_questions == 3 and "7 of 10 rows are left out" in said and "line 3" in said
    assert spec.location(2) == f"{path}, line 11"
    assert Questions(str(path), bad_rows="skip", domain="x").task(3).content == "1+1?"
    path.write_text("nonsense\n")
    with pytest.raises(DataError, match="line 1: is not JSON"):
        Questions(str(path), bad_rows="skip", answer_key="").task(0)
    with pytest.raises(ConfigError, match="neither error nor skip"):
        Questions(str(path), bad_rows="drop")


@pytest.mark.parametrize(
    "bad, why",
    [
        ('{"question": "?", "answer": NaN}', "NaN is not a number in JSON"),
        ('{"question": "?", "answer": "7", "score": -Infinity}', "-Infinity is not a number in JSON"),
        ('{"question": "?", "answer": 1e999}', "answer is inf, not a finite number"),
        ('{"question": "?", "answer": "7", "answer": "8"}', "key 'answer' stands twice in one object"),
        ('{"question": "?", "answer": {"value": 1, "value": 2}}', "key 'value' stands twice"),
        ('{"question": "?", "answer": "7", "id": "\\ud800"}', "id holds half of a surrogate pair"),
        ('{"question": "?", "answer": "7", "\\udfff": 1}', "holds half of a surrogate pair"),
        ('{"question": "?", "answer": "7", "id": "\udabc"}', "id holds half of a surrogate pair"),
    ],
)
@pytest.mark.parametrize("name", ["lines.jsonl", "array.json"])
def test_rows_that_say_two_things_or_no_number_are_bad(tmp_path, name, bad, why):
    path, good = tmp_path / name, '{"question": "1+1?", "answer": "2", "smile": "\\ud83d\\ude00"}'
    text = f"[{good},{bad}]" if name == "array.json" else f"{good}\n{bad}\n"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(DataError, match=why):
        Questions(str(path)).task(0)
    skipping = Questions(str(path), bad_rows="skip")
    assert skipping.num_questions == 1 and skipping.record(0)["smile"] == "\U0001f600"


def test_bad_rows_of_programs_parquet_and_json_text(tmp_path):
    with pytest.raises(DataError, match="record 1 of .*: is not JSON: NaN"):
        Questions(records=[{"question": "?", "answer": 1}, {"question": "?", "answer": float("nan")}]).task(0)
    with pytest.raises(DataError, match="record 0 of .*: question holds half of a surrogate pair"):
        Questions(records=[{"question": "\ud800", "answer": 1}]).task(0)
    pyarrow.parquet.write_table(pyarrow.table({"question": ["?", "?"], "answer": [1.0, float("nan")]}), tmp_path / "a")
    with pytest.raises(DataError, match="row 1: answer is nan, not a finite number"):
        Questions(str(tmp_path / "a")).task(0)
    broken = pyarrow.array([b"1+1?", b"\xff?"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"question": broken, "answer": [1, 2]}), tmp_path / "b")
    with pytest.raises(DataError, match="row 1: holds bytes that are no text"):
        Questions(str(tmp_path / "b")).task(0)
    verl = {"prompt": "?", "reward_model": '{"ground_truth": "1", "ground_truth": "2"}'}
    with pytest.raises(
        DataError, match=r"reward_model\.ground_truth .* as JSON text, but key 'ground_truth' stands twice"
    ):
        Questions(records=[verl]).task(0)
    talk = '[{"role": "user", "role": "system", "content": "?"}]'
    with pytest.raises(DataError, match="holds messages as JSON text, but key 'role' stands twice"):
        Questions(records=[{"messages": talk, "answer": 1}]).task(0)


def test_a_row_of_many_columns_is_not_listed_in_full(tmp_path):
    as_lines(tmp_path / "a.jsonl", [{f"column{i}": i for i in range(5000)}])
    with pytest.raises(ConfigError) as e:
        Questions(str(tmp_path / "a.jsonl")).task(0)
    assert "column29, and " in str(e.value) and "column31" not in str(e.value)


# ---- data as others write it ----------------------------------------------------------------------------------------

ASK = {"role": "user", "content": "Say no."}
NO, YES = {"role": "assistant", "content": "No."}, {"role": "assistant", "content": "Yes."}
BE = {"role": "system", "content": "Be brief."}
SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Say no."},
    {"from": "gpt", "value": "No."},
]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "no."}]}, NO]


def record(tmp_path, row, **settings):
    as_lines(tmp_path / "data.jsonl", [row])
    return Records(str(tmp_path / "data.jsonl"), **settings).record(0)


def said(*messages):
    return tuple(Message(m["role"], m["content"]) for m in messages)


@pytest.mark.parametrize(
    "row, initial_messages, answers, rejected",
    [
        ({"messages": [BE, ASK, NO]}, [BE, ASK], ["No."], None),
        ({"messages": json.dumps([BE, ASK, NO])}, [BE, ASK], ["No."], None),
        ({"conversations": SHAREGPT}, [BE, ASK], ["No."], None),
        ({"messages": PARTS}, [ASK], ["No."], None),
        ({"messages": [m | {"tool_calls": None, "weight": None} for m in (ASK, NO)]}, [ASK], ["No."], None),
        ({"prompt": [ASK], "completion": [NO]}, [ASK], ["No."], None),
        ({"prompt": "Say no.", "completion": "No."}, [ASK], ["No."], None),
        ({"instruction": "Say no.", "output": "No.", "id": 3}, [ASK], ["No."], None),
        ({"question": "Say no.", "answer": 7}, [ASK], ["7"], None),
        ({"prompt": "Say no.", "chosen": "No.", "rejected": "Yes."}, [ASK], ["No."], "Yes."),
        ({"prompt": [ASK], "chosen": [NO], "rejected": [YES]}, [ASK], ["No."], "Yes."),
        ({"prompt": "Say no.", "chosen": [ASK, NO], "rejected": [ASK, YES]}, [ASK], ["No."], "Yes."),
        ({"chosen": [BE, ASK, NO], "rejected": [BE, ASK, YES]}, [BE, ASK], ["No."], "Yes."),
        ({"chosen": json.dumps([ASK, NO]), "rejected": json.dumps([ASK, YES])}, [ASK], ["No."], "Yes."),
        ({"chosen": "Say no. No.", "rejected": "Say no. Yes."}, [ASK], ["No."], "Yes."),
    ],
)
def test_conversations_and_pairs_as_others_write_them(tmp_path, row, initial_messages, answers, rejected):
    got = record(tmp_path, row)
    assert (
        got.initial_messages == said(*initial_messages)
        and [a.text for a in got.answers] == answers
        and got.rejected == rejected
    )


@pytest.mark.parametrize(
    "row, why",
    [
        ({"prompt": [ASK], "chosen": [BE, YES, NO], "rejected": [YES]}, "begins with other messages"),
        ({"chosen": [ASK, NO], "rejected": [BE, YES]}, "do not begin with the same messages"),
        ({"chosen": "Say no.", "rejected": "Yes."}, "begin with different texts"),
        ({"chosen": [ASK, NO], "rejected": [ASK]}, "does not end with a message of the assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, NO]}, "a part that is no text"),
        ({"prompt": "Say no.", "answer": {"text": "No."}}, "answer is an object, not a text"),
    ],
)
def test_rows_of_other_kinds_that_are_none(tmp_path, row, why):
    with pytest.raises(DataError, match=why):
        record(tmp_path, row)


def test_a_choice_instead_of_dropping_a_column(tmp_path):
    row = {"prompt": "Say no.", "chosen": "No.", "rejected": "Yes.", "messages": [BE, ASK, NO], "completion": "Nope."}
    with pytest.raises(ConfigError, match="answers or pairs or conversations") as e:
        record(tmp_path, row)
    assert e.value.setting == "Records.kind" and "Records.kind = 'pairs'" in e.value.remedy
    assert record(tmp_path, row, kind="pairs").rejected == "Yes."
    assert record(tmp_path, row, kind="conversations").initial_messages == said(BE, ASK)
    assert record(tmp_path, row, answer_key="completion").answers[0].text == "Nope."
    assert record(tmp_path, row, messages_key="messages").initial_messages == said(BE, ASK)
    with pytest.raises(ConfigError, match="columns of different kinds"):
        record(tmp_path, row, kind="pairs", messages_key="messages")
    with pytest.raises(ConfigError, match="neither a prompt and an answer"):
        record(tmp_path, {"text": "All of it."})


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.text(max_size=5) | st.integers() | st.none()), min_size=1))
def test_whatever_rows_hold_they_come_back(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    as_lines(path, rows)
    got = open_rows([path])
    assert [got.row(i) for i in range(len(got))] == rows
    assert [got.location(i) for i in range(len(got))] == [f"{path}, line {2 * i + 1}" for i in range(len(rows))]
