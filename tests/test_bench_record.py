"""The JSON object of `openelm bench`: what it must hold, what is refused, and the files sent in by users."""

import copy
import json
import re
from pathlib import Path

import pytest
from fake_bench import FakeModel, run

import openelm_mlx
from openelm_mlx import device, footprint, power
from openelm_mlx.benchmarks import paper, record
from openelm_mlx.benchmarks.record import check_publishable, check_record, new_record, read_record
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.errors import RecordError

ROOT = Path(__file__).parents[1]
RESULTS = sorted((Path(openelm_mlx.__file__).parent / "benchmarks" / "results").glob("*.json"))


@pytest.fixture(scope="module")
def good():
    return json.loads(json.dumps(new_record([run(FakeModel()).to_dict()], {"num_trials": 2}, interrupted=False)))


def test_what_bench_makes_is_a_record_and_survives_json(good, tmp_path):
    check_record(good)
    (tmp_path / "good.json").write_text(json.dumps(good))
    assert read_record(tmp_path / "good.json") == good
    check_publishable(good, "good.json")


def test_the_keys_of_the_first_version_are_kept(good):
    assert {"machine", "results"} <= good.keys()
    first = {"model", "prompt_tokens", "generation_tokens", "prompt_tps", "generation_tps", "ttft_s",
             "peak_memory_bytes", "trials"}  # fmt: skip
    assert first <= good["results"][0].keys()
    old = copy.deepcopy(good)
    del old["schema_version"], old["settings"]
    old["results"][0] = {key: value for key, value in old["results"][0].items() if key in first}
    check_record(old)  # as version 1 wrote it
    with pytest.raises(RecordError, match="version 1"):
        check_publishable(old, "old.json")


def set_at(value, *path):
    def change(record):
        for step in path[:-1]:
            record = record[step]
        if value is None:
            del record[path[-1]]
        else:
            record[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_at(99, "schema_version"), "schema_version 99 is unknown"),
        (set_at(None, "machine"), "machine is missing"),
        (set_at(None, "machine", "chip"), "machine.chip is missing"),
        (set_at(None, "results"), "results is missing"),
        (set_at({}, "results"), "results is no list"),
        (set_at("fast", "results", 0, "prompt_tps"), "results[0].prompt_tps is 'fast'"),
        (set_at(float("inf"), "results", 0, "ttft_s"), "results[0].ttft_s is inf"),
        (set_at(-1, "results", 0, "peak_memory_bytes"), "results[0].peak_memory_bytes is -1"),
        (set_at(True, "results", 0, "warm_ups"), "results[0].warm_ups is True"),
        (set_at(0, "results", 0, "batch_size"), "results[0].batch_size is 0"),
        (set_at([], "results", 0, "trials"), "results[0].trials is missing or empty"),
        (set_at(None, "results", 0, "trials", 1, "decode_s"), "results[0].trials[1].decode_s is missing"),
        (set_at(["x"], "results", 0, "variant"), "results[0].variant is ['x']"),
        (set_at("x", "results", 0, "limits"), "results[0].limits is 'x'"),
        (set_at({"decode": {}}, "results", 0, "limits"), "results[0].limits.device is missing"),
        (set_at([1], "results", 0, "prompt_tps_interval"), "results[0].prompt_tps_interval is [1]"),
        (set_at({"prompt_tps": "x"}, "results", 0, "drift"), "results[0].drift.prompt_tps is 'x'"),
        (set_at([1], "machine", "gpu_cores"), "machine.gpu_cores is [1]"),
        (set_at(["x"], "date"), "the record.date is ['x']"),
        (set_at(1e6, "results", 0, "generation_tps"), "generation_tps is 1000000.0, the median of its trials 10"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(good, change, words, tmp_path):
    bad = copy.deepcopy(good)
    change(bad)
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(bad))
    with pytest.raises(RecordError) as refused:
        read_record(file)
    message = str(refused.value)
    assert words in message
    assert str(file) in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "words"), [(b"{", "not valid JSON"), (b"[1]", "holds list"), (b"\xff", "not valid")]
)
def test_what_is_no_object_is_refused(tmp_path, content, words):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(RecordError, match=words):
        read_record(tmp_path / "x.json")


def test_many_faults_are_counted_and_not_all_printed(good):
    bad = copy.deepcopy(good)
    bad["machine"] = {}
    with pytest.raises(RecordError, match="and 1 more"):
        check_record(bad)


def test_there_is_a_result_to_begin_with():
    assert RESULTS


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_results_that_were_sent_in_are_records(file):
    found = read_record(file)
    check_publishable(found, file.name)
    assert found["schema_version"] == record.SCHEMA_VERSION


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_at("/somewhere/model", "results", 0, "model"), "names a path"),
        (set_at(True, "interrupted"), "interrupted"),
        (set_at([], "results"), "no results"),
    ],
)
def test_what_cannot_be_published(good, change, words):
    bad = copy.deepcopy(good)
    change(bad)
    with pytest.raises(RecordError, match=words):
        check_publishable(bad, "bad.json")


def test_every_key_is_explained(good):
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`(\w+)`", page))
    result = good["results"][0]
    for part in (good, good["machine"], result, result["trials"][0]):
        assert set(part) - explained == set()


def test_the_commit_is_the_checkouts_and_none_without_one(tmp_path):
    assert record.commit(tmp_path) is None
    if (ROOT / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", record.commit(ROOT))


class TestPaper:
    def test_rates_are_counted_as_the_paper_does(self):
        """All G tokens over a time without the first, a mean: 11 tokens in ten steps of 0.1 s are 11 tokens/s."""
        rates = paper.as_the_paper_counts(run(FakeModel(prefill_s=1.0, step_s=0.1), generation_tokens=11))
        assert rates == pytest.approx((8.0, 11.0, 19 / 2.0))

    def test_recalled_numbers_belong_to_the_four_sizes_only(self):
        real = OpenELMConfig.from_name("1_1B")
        assert paper.recalled(real, "4-bit").generation == 117.90
        assert paper.recalled(real, "bfloat16").total == 81.04
        assert paper.recalled(real, "float32") is None
        assert paper.recalled(OpenELMConfig.from_name("1_1B", num_transformer_layers=4), "4-bit") is None

    def test_recalled_numbers_agree_with_each_other(self):
        """total = (P + G) / (P/prompt + G/generation) with P = 36 and G = 1024, to half a percent."""
        for rates in paper.RECALLED.values():
            total = (36 + 1024) / (36 / rates.prompt + 1024 / rates.generation)
            assert total == pytest.approx(rates.total, rel=5e-3)

    def test_they_are_marked(self):
        model = FakeModel()
        result = run(model)
        entry = paper.to_dict(result, OpenELMConfig.from_name("270M"))
        assert entry["recalled"] is None  # a float16 fake
        assert entry["as_the_paper_counts"].keys() == {"prompt", "generation", "total"}
        assert "as recalled" in paper.STANDING


class TestMachine:
    def test_a_macs_power(self):
        battery = "Now drawing from 'Battery Power'\n -InternalBattery-0\t80%; discharging;"
        assert power.read_pmset(battery, " lowpowermode         1\n sleep 1\n") == {
            "power_source": "battery",
            "low_power_mode": True,
        }
        assert power.read_pmset("Now drawing from 'AC Power'\n", " sleep 1\n") == {
            "power_source": "mains",
            "low_power_mode": None,
        }

    def test_a_linux_laptops_power(self, tmp_path, monkeypatch):
        for name, kind, online in (("AC", "Mains", "0"), ("BAT0", "Battery", "")):
            (tmp_path / name).mkdir()
            (tmp_path / name / "type").write_text(f"{kind}\n")
            (tmp_path / name / "online").write_text(online)
        (tmp_path / "profile").write_text("low-power\n")
        monkeypatch.setattr(power, "_SUPPLIES", tmp_path)
        monkeypatch.setattr(power, "_PROFILE", tmp_path / "profile")
        monkeypatch.setattr("platform.system", lambda: "Linux")
        assert power.power_record() == {"power_source": "battery", "low_power_mode": True}
        (tmp_path / "AC" / "online").write_text("1\n")
        assert power.power_record()["power_source"] == "mains"

    def test_gpu_cores_are_read_where_there_is_metal(self, monkeypatch):
        assert device.is_metal() or device.gpu_cores() is None
        monkeypatch.setattr(device, "is_metal", lambda: True)
        answer = '  | {\n    "gpu-core-count" = 38\n    "model" = "Apple M2 Max"\n'
        monkeypatch.setattr("subprocess.run", lambda *_, **__: type("Done", (), {"stdout": answer}))
        assert device.gpu_cores() == 38

    def test_the_footprint_grows_with_what_is_held(self):
        before = footprint.process_footprint_bytes()
        held = bytearray(b"x" * 50_000_000)
        after = footprint.process_footprint_bytes()
        assert before is None or 40_000_000 < after - before < 90_000_000
        assert len(held) == 50_000_000
