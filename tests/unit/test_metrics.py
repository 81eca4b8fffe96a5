"""The metric table: unique names, exposed with their types, documented."""

from __future__ import annotations

import pytest

from jaxserve.cli.internal.reference import metrics_table
from jaxserve.ipc.stats import EngineStats
from jaxserve.metrics import METRICS, PREFIX, FamilySnapshot, Metrics, exposition
from tests.unit.running_api import MODEL_INFO


def test_histograms_alone_have_buckets_which_rise() -> None:
    for name, spec in METRICS.items():
        assert (spec.kind == "histogram") == bool(spec.buckets), name
        assert list(spec.buckets) == sorted(set(spec.buckets)), name


def test_every_metric_is_exposed_with_its_type() -> None:
    text = exposition(Metrics("m").snapshot()).decode()
    for name, spec in METRICS.items():
        name = PREFIX + name + ("_total" if spec.kind == "counter" else "")
        assert f"# TYPE {name} {spec.kind}\n" in text


def test_descriptors_of_the_fullest_process_are_compared_with_the_limit_of_each() -> None:
    def process(num_open: float) -> list[FamilySnapshot]:
        values = {"process_open_fds": num_open, "process_max_fds": 1024.0}
        return [FamilySnapshot(name, "", "gauge", [(name, {}, value)]) for name, value in values.items()]

    lines = exposition(process(5), process(9)).decode().splitlines()
    assert {"process_open_fds 9.0", "process_max_fds 1024.0"} <= set(lines)


def test_samples_carry_model_and_engine() -> None:
    text = exposition(Metrics("some/model").snapshot()).decode()
    assert 'jaxserve:num_requests_running{engine="0",model_name="some/model"} 0.0' in text
    assert 'jaxserve:compilations_total{engine="0",model_name="some/model",phase="serving"} 0.0' in text


def test_compilations_arrive_as_totals() -> None:
    metrics = Metrics("m")
    for total in (3, 3, 5):
        metrics.record_stats(EngineStats(compilations={"warmup": total}))
    assert metrics.value("compilations", phase="warmup") == 5


def test_adapters_are_reported_as_protocol_003_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are in memory, so each is ready and none waits; the value is the time of the last change."""
    monkeypatch.setattr("jaxserve.metrics.time.time", lambda: 1234.0)
    processes = [Metrics("m", adapters=("sql", "poems"), max_adapters=3) for _ in range(2)]
    for metrics in processes:
        metrics.record_ready(MODEL_INFO)
    assert _adapters_samples(*processes) == [_adapters_sample("sql,poems")]
    for metrics in processes:
        metrics.record_adapters(["poems", "law"])
    assert _adapters_samples(*processes) == [_adapters_sample("poems,law")]
    processes[0].forget_engine()
    assert "lora_requests_info{" not in exposition(processes[0].snapshot()).decode()


def _adapters_samples(*processes: Metrics) -> list[str]:
    text = exposition(*(metrics.snapshot() for metrics in processes)).decode()
    return [line for line in text.splitlines() if line.startswith("jaxserve:lora_requests_info{")]


def _adapters_sample(names: str) -> str:
    labels = f'max_lora="3",model_name="m",running_lora_adapters="{names}",waiting_lora_adapters=""'
    return f'jaxserve:lora_requests_info{{engine="0",{labels}}} 1234.0'


def test_two_servers_in_one_process_do_not_meet() -> None:
    first, second = Metrics("m"), Metrics("m")
    first.inc("client_disconnects")
    assert (first.value("client_disconnects"), second.value("client_disconnects")) == (1, 0)


@pytest.mark.parametrize(("method", "name"), [("inc", "num_requests_running"), ("observe", "generation_tokens")])
def test_a_metric_is_used_as_what_it_is(method: str, name: str) -> None:
    with pytest.raises(AssertionError):
        getattr(Metrics("m"), method)(name, 1)


def test_table_names_every_metric() -> None:
    table = metrics_table()
    assert all(f"`{PREFIX}{name}" in table for name in METRICS)


def test_numbers_of_several_processes_add_up() -> None:
    first, second = Metrics("m"), Metrics("m")
    for metrics, tokens in ((first, 3), (second, 4)):
        metrics.inc("generation_tokens", tokens)
        metrics.inc("http_requests", route="/ready", status=str(200 + tokens))
        metrics.observe("request_generation_tokens", tokens)
        metrics.set("startup_phase_seconds", tokens, phase="load")
    first.set("num_requests_running", 5)
    text = exposition(first.snapshot(), second.snapshot()).decode()
    labels = 'engine="0",model_name="m"'
    for line in (
        f"generation_tokens_total{{{labels}}} 7.0",
        f'http_requests_total{{{labels},route="/ready",status="203"}} 1.0',
        f'http_requests_total{{{labels},route="/ready",status="204"}} 1.0',
        f"request_generation_tokens_count{{{labels}}} 2.0",
        f"request_generation_tokens_sum{{{labels}}} 7.0",
        f'request_generation_tokens_bucket{{{labels[:10]},le="5.0",{labels[11:]}}} 2.0',
        f"num_requests_running{{{labels}}} 5.0",
        f'startup_phase_seconds{{{labels},phase="load"}} 4.0',
    ):
        assert f"\n{PREFIX}{line}\n" in text
    created = [
        float(part.partition(f"{PREFIX}generation_tokens_created{{{labels}}} ")[2].partition("\n")[0])
        for part in (text, exposition(first.snapshot()).decode(), exposition(second.snapshot()).decode())
    ]
    assert created[0] == min(created[1:])
