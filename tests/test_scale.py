"""The model of cost: it recovers known costs, predicts a third rate, and marks what was measured."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from programs import ROOT
from report_records import edit
from scale_records import GBIT, TRUTH, write_bench

from cos598d.commands.cli import main
from cos598d.cost.benches import load_record, load_records
from cos598d.cost.calls import plan_calls
from cos598d.cost.fit import EFFICIENCY, fit
from cos598d.cost.model import (
    Compute,
    Costs,
    Link,
    ModelledCall,
    arrange,
    beside_backward,
    computes_by_batch,
    iteration_seconds,
    run_together,
)
from cos598d.cost.scaling import host_counts, misses, scale_points
from cos598d.records.fit import CallCost, predict_exposed
from cos598d.sync import SYNCS, get_sync
from cos598d.sync.gather_scatter import GATHER, SCATTER
from cos598d.terminal.fields import defaults_of

# The syncs whose calls and bytes follow from the tensors alone, on hosts of one rank each.
EXPECTED = {name: get_sync(name).expected([(1000, 4)], 4, 0) for name in SYNCS if not get_sync(name).not_modelled}
STATED = [name for name, cost in EXPECTED.items() if cost and cost.calls and cost.bytes_sent]


@pytest.fixture
def made(tmp_path):
    """made(name, ...) -> the folder of a record as `write_bench` makes it."""
    return lambda name, **setting: write_bench(tmp_path / name, **setting)


@pytest.fixture
def two(made):
    """two(**setting) -> the folders of two records that differ in their rate."""
    return lambda **setting: [made("fast", **setting), made("slow", rate=GBIT / 10, **setting)]


@pytest.fixture
def scaled(capsys):
    """scaled(*words) -> what `scale` prints."""

    def _scaled(*words):
        assert main(["scale", *map(str, words)]) == 0
        return capsys.readouterr().out

    return _scaled


@pytest.fixture
def refused(capsys):
    """refused(*words) -> the exit code of `scale`, and its one sentence."""

    def _refused(*words):
        code, said = main(["scale", *map(str, words)]), capsys.readouterr().err
        assert said.endswith(".\n")
        assert said.count("\n") == 1
        return code, said

    return _refused


def test_known_costs_are_recovered_from_two_rates(two):
    plain = "gather_scatter,all_reduce,flat,overlap,bucketed,ring,halving_doubling,tree"
    costs = fit(load_records(two(syncs=plain))).costs
    for name in ("call_seconds", "step_seconds", "processor_seconds_per_byte"):
        assert getattr(costs, name) == pytest.approx(getattr(TRUTH, name), rel=0.1), name
    assert costs.efficiency == pytest.approx(TRUTH.efficiency, rel=0.03)


def test_a_third_rate_is_predicted_within_15_percent_for_every_rung_in_noise(made):
    for seed in range(3):
        noisy = [made(f"{seed} {rate}", rate=rate, noise=0.03, seed=seed + rate) for rate in (10**8, 10**9)]
        third = load_record(made(f"{seed} third", rate=0.3 * GBIT))
        found = misses(fit(load_records(noisy)), third)
        assert [miss.sync for miss in found] == [rung.label for rung in third.rungs]
        assert max(abs(miss.miss) for miss in found) < 0.15, found


def test_one_record_fits_fewer_costs_with_a_remark(made):
    fitted = fit(load_records([made("only")]))
    assert fitted.costs.efficiency == EFFICIENCY
    assert any("all benches have the same rate" in remark for remark in fitted.remarks)
    assert any("all benches have 4 hosts" in remark for remark in fitted.remarks)


def test_another_delay_and_another_number_of_hosts_are_predicted_from_the_formulas(made, two):
    plain = "gather_scatter,all_reduce,flat,bucketed,tree"
    fitted = fit(load_records(two(syncs=plain)))
    far, many = made("far", syncs=plain, delay=0.01), made("many", syncs=plain, ranks=8)
    # Sixteen tensors and more, each waiting for six steps of 10 ms: the delay is most of it.
    assert max(abs(miss.miss) for miss in misses(fitted, load_record(far))) < 0.02
    assert load_record(many).crowd == 4
    # More ranks on the same cores are predicted as on their own hosts, except for the busiest rank.
    assert max(abs(miss.miss) for miss in misses(fitted, load_record(many))) < 0.05


def test_only_a_library_ring_s_segments_wait_for_a_delay_in_pairs(made):
    record = load_record(made("any", syncs="all_reduce,flat,bucketed+bf16,ring,reduce_broadcast"))
    planned = {rung.label: plan_calls(rung, record, 4, record.batch) for rung in record.rungs}
    payload = sum(tensor.bytes for tensor in record.tensors)
    assert [call.segments for call in planned["flat"]] == [6 * -(-payload // (4 << 20))]
    assert {call.segments for call in planned["all_reduce"]} >= {12}, "small tensors go in two segments a rank"
    assert min(call.segments for call in planned["bucketed+bf16"]) >= 12
    assert {call.segments for call in planned["ring"]} == {0}, "its messages are whole"
    others = replace(record, work=record.work | {"backend": "nccl"})
    for label in ("flat", "reduce_broadcast"):
        rung = next(rung for rung in record.rungs if rung.label == label)
        assert max(call.segments for call in planned[label]) >= 6
        assert {call.segments for call in plan_calls(rung, others, 4, record.batch)} == {0}, "they are gloo's"
    costs = Costs(0.0, 1e-3, 0.0, 1.0)

    def waits(label, delay, rate=None):
        calls = arrange(planned[label], record.compute, 1.0)
        none, some = (
            iteration_seconds(label, calls, record.compute, Link(rate, seconds), costs, overlaps=False)
            for seconds in (0.0, delay)
        )
        return some - none

    segments = planned["flat"][0].segments
    assert waits("flat", 0.01) == pytest.approx(segments / 2 * 0.02 - 6 * 0.001)
    # Sending a segment takes longer than its receiver's word: only the steps wait.
    assert waits("flat", 0.01, rate=1e8) == pytest.approx(6 * 0.01)
    assert waits("ring", 0.01) == pytest.approx(6 * 0.01)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("name", STATED)
def test_the_calls_carry_what_the_ledger_s_formulas_say(name, ranks, made):
    record = load_record(made("any", ranks=2, syncs=name))
    rung = record.rungs[0]
    calls = plan_calls(rung, record, ranks, record.batch)
    sizes = [(tensor.numel(), tensor.element_size()) for tensor in record.tensors]
    sync = get_sync(name)
    options = sync.options_kind(**{key: rung.options[key] for key in defaults_of(sync.options_kind)})
    costs = [sync.expected(sizes, ranks, rank, options) for rank in range(ranks)]
    moved = [cost.bytes_sent + cost.bytes_received for cost in costs]
    assert len(calls) == costs[0].calls
    # Reduce's bytes are the library's, which is generous with large tensors.
    close = {"rel": 0.2 if name == "reduce_broadcast" else 1e-3}
    assert sum(call.busiest_bytes for call in calls) == pytest.approx(max(moved), **close)
    assert sum(call.mean_bytes for call in calls) == pytest.approx(sum(moved) / ranks, **close)
    busiest_direction = max(max(cost.bytes_sent, cost.bytes_received) for cost in costs)
    assert sum(call.link_bytes for call in calls) >= busiest_direction * 0.99


def test_ddp_s_buckets_are_closed_by_the_tensor_that_fills_them(made):
    record = load_record(made("any", syncs="ddp"))
    calls = plan_calls(record.rungs[0], record, 2, 4)
    sizes = {tensor.name: tensor.bytes for tensor in record.tensors}
    filled = [sum(sizes[name] for name in call.tensors) for call in calls]
    # The head and the last layer's large matrix are over 1 MiB together; the rest is under 25 MiB.
    assert [call.tensors[-1] for call in calls] == ["layer.3.2", "embeddings.word_embeddings.weight"]
    assert filled[0] >= 1 << 20 > filled[0] - sizes["layer.3.2"]
    assert sum(filled) == sum(sizes.values())


def test_a_codec_s_bytes_are_those_of_its_formula_and_topk_s_grow_with_the_hosts(made):
    record = load_record(made("any"))
    by_label = {rung.label: rung for rung in record.rungs}
    size = sum(tensor.bytes for tensor in record.tensors)

    def link_bytes(label, ranks):
        return sum(call.link_bytes for call in plan_calls(by_label[label], record, ranks, record.batch))

    assert link_bytes("bucketed+bf16", 4) == pytest.approx(0.75 * size)
    assert link_bytes("bucketed+bf16", 16) == pytest.approx(15 / 16 * size)
    assert link_bytes("ring+topk", 4) == pytest.approx(3 * size / 50, rel=1e-4)
    assert link_bytes("ring+topk", 101) == pytest.approx(2 * size, rel=1e-4)


def test_more_hosts_and_larger_batches_use_more_rows_up_to_all(made):
    record = load_record(made("any"))
    rung = next(rung for rung in record.rungs if rung.sync == "sparse_rows")
    rows = [plan_calls(rung, record, n, batch)[-1] for n, batch in ((4, 4), (8, 4), (4, 8), (256, 4))]
    shares = [call.mean_bytes / (4 * (n - 1) / n) / 15_360_000 for call, n in zip(rows, (4, 8, 4, 256), strict=True)]
    assert shares[0] == pytest.approx(1 / 3, abs=0.002)
    assert shares[1] == shares[2] == pytest.approx(1 - (2 / 3) ** 2, abs=0.002)
    assert shares[3] == pytest.approx(1, abs=0.002)


def test_one_call_at_a_time_is_the_recursion_of_the_bench():
    cost, generator = CallCost(overhead_seconds=0.02, bytes_per_second=1e3), np.random.default_rng(3)
    for _ in range(200):
        ready = np.sort(generator.uniform(0, 1, size=5))
        sizes = generator.integers(1, 400, size=5)
        work, travel = np.full(5, cost.overhead_seconds), sizes / cost.bytes_per_second
        ended = run_together(ready.tolist(), work, travel, travel, at_once=1)
        expected = predict_exposed(list(zip(ready, sizes, strict=True)), 1.0, cost)
        assert max(0, ended - 1) == pytest.approx(expected, abs=1e-12)


def test_two_calls_at_once_share_the_link_and_a_third_waits():
    one, none = np.ones(3), np.zeros(3)
    # They need only the link: two take as long together as one after the other.
    assert run_together([0.0] * 3, none, one, one) == pytest.approx(3)
    # Waiting needs nothing: two wait at once, then the third.
    assert run_together([0.0] * 3, none, one, none) == pytest.approx(2)
    # Each needs the link for half of its time: two fill it at full speed.
    assert run_together([0.0] * 3, none, one, one / 2) == pytest.approx(2)
    # Each needs it for three quarters: two take 1.5 times as long.
    assert run_together([0.0] * 2, none[:2], one[:2], 0.75 * one[:2]) == pytest.approx(1.5)
    # One sends while the other computes.
    assert run_together([0.0] * 2, np.array([1.0, 0.0]), np.array([0.0, 1.0]), np.array([0.0, 1.0])) == pytest.approx(1)
    # One that begins later shares from then on.
    assert run_together([0.0, 0.5], none[:2], one[:2], one[:2]) == pytest.approx(2)


def test_work_during_backward_delays_it_on_a_cpu():
    ready, work, none = np.array([0.2, 0.5]), np.array([0.3, 0.1]), np.zeros(2)
    # Nothing is sent: each call's work delays what comes after it, and backward.
    ended, computed = beside_backward(ready, work, none, none, 1.0, steals=True)
    assert computed == pytest.approx(1.4)
    assert ended == pytest.approx(0.5 + 0.3 + 0.1)
    # A last call that is full as backward ends is all exposed, and takes no more from it.
    travel = np.array([0.0, 2.0])
    ended, computed = beside_backward(np.array([0.2, 1.0]), work, travel, travel, 1.0, steals=True)
    assert (ended, computed) == pytest.approx((1 + 0.3 + 0.1 + 2, 1.3))


def test_the_busiest_rank_counts_if_it_has_more_than_its_share_of_the_cores():
    loads = [collective.load(100, 16) for collective in (GATHER, SCATTER)]
    compute, calls = Compute(0, 1, 0, {"a": 1.0}), [ModelledCall(**vars(load), tensors=("a",)) for load in loads]
    assert arrange(calls, compute, crowd=1000).moved_bytes == pytest.approx([2 * 15 / 16 * 100] * 2)
    assert arrange(calls, compute, crowd=1).moved_bytes == pytest.approx([15 * 100] * 2)


def test_two_batches_give_the_part_that_does_not_grow():
    def compute(seconds):
        return Compute(0.25 * seconds, 0.5 * seconds, 0.25 * seconds, {"a": 0.1 * seconds})

    one, fixed = computes_by_batch({4: compute(0.4)}, 8)
    assert (one.seconds, one.arrivals["a"], fixed) == pytest.approx((0.8, 0.08, 0))
    two, fixed = computes_by_batch({4: compute(0.5), 8: compute(0.9)}, 16)
    assert (two.seconds, fixed) == pytest.approx((1.7, 0.1))
    assert computes_by_batch({4: compute(0.5), 8: compute(0.9)}, 4)[0].seconds == 0.5


def test_speed_up_is_relative_to_one_host_and_measured_points_are_marked(two):
    fitted = fit(load_records(two(syncs="flat")))
    points = {(p.sync, p.hosts): p for p in scale_points(fitted, 16, Link(GBIT), 4)}
    alone, four = points["flat", 1], points["flat", 4]
    assert (alone.seconds, alone.speed_up, alone.efficiency) == (0.5, 1, 1)
    assert four.speed_up == pytest.approx(4 * 0.5 / four.seconds)
    assert four.efficiency == pytest.approx(four.speed_up / 4)
    measured = fitted.records[0].rungs[0].seconds
    assert (four.measured_seconds, four.measured_speed_up) == (measured, pytest.approx(4 * 0.5 / measured))
    assert {hosts for (_, hosts), p in points.items() if p.measured_seconds is not None} == {4}
    assert not [p for p in scale_points(fitted, 16, Link(0.3 * GBIT), 4) if p.measured_seconds is not None]
    assert not [p for p in scale_points(fitted, 16, Link(GBIT), 8) if p.measured_seconds is not None]


def test_hosts_are_powers_of_two_the_largest_and_the_measured_ones():
    assert host_counts(256, [4]) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert host_counts(12, [3, 20]) == [1, 2, 3, 4, 8, 12]


def test_the_command_prints_tables_with_what_was_measured_in_brackets(two, scaled):
    text = scaled(*two(), "--to", "256")
    assert "fast: 4 ranks, links of 1gbit, batch 4" in text
    head = next(line for line in text.splitlines() if line.startswith("sync"))
    assert head.split() == ["sync", "1", "2", "4", "8", "16", "32", "64", "128", "256"]
    rows = [line for line in text.splitlines() if line.startswith("flat ")]
    # Seconds and speed-up.
    assert [row.count("[") for row in rows] == [1, 1]
    assert "fastest on 256 hosts" in text.splitlines()[0]
    assert "[brackets] were measured" in text


def test_the_command_predicts_a_record_from_the_others_and_names_a_large_miss(made, two, scaled):
    folders, third = two(), made("third", rate=0.3 * GBIT)
    assert "every miss is within 15%" in scaled(*folders, "--predict", third)
    edit(third / "bench.json", lambda found: found["summary"]["flat"].update(seconds_median=100.0))
    # It is not fitted, even if it is named among the records too.
    found = json.loads(scaled(*folders, third, "--predict", third, "--json", "-"))
    assert [record["name"] for record in found["records"]] == list(map(str, folders))
    assert {miss["sync"]: miss["miss"] for miss in found["misses"]}["flat"] < -0.9
    assert "missed by more than 15%: flat (-9" in scaled(*folders, "--predict", third)


def test_ranks_that_share_the_cores_differently_are_predicted_with_their_own_compute(made, two, scaled):
    # Four times as slow a compute, since twice as many ranks share the cores.
    words = [*two(), "--predict", made("many", ranks=8, compute=2.0)]
    found = json.loads(scaled(*words, "--json", "-"))
    assert found["own_compute"]
    assert "none" not in {miss["sync"] for miss in found["misses"]}
    assert max(abs(miss["miss"]) for miss in found["misses"]) < 0.05
    assert "compute is from its own baseline" in scaled(*words)


def test_what_cannot_be_modelled_is_left_out_with_its_reason(made, scaled):
    folder = made("odd", syncs="flat,all_reduce,local_sgd,shared_memory")
    edit(folder / "bench.json", lambda found: found["candidates"][0].update(sync="mine.py:Sum"))
    text = scaled(folder, "--to", "4")
    left = dict(re.findall(r"left out: (\w+), for (.*?)[.;\n]", text))
    assert "unknown" in left["flat"]
    assert "not average gradients in every step" in left["local_sgd"]
    assert "one host only" in left["shared_memory"]
    assert "\nall_reduce " in text
    assert "\nflat " not in text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda found: found.pop("candidates"), "is not the result of a bench"),
        (lambda found: found.update(candidates=[]), "only a sweep of messages"),
        (lambda found: found["candidates"].pop(-2), "has no measurement without communication (sync none)"),
        (lambda found: found.pop("arrivals"), "without the arrival times of gradients"),
        (lambda found: found["summary"].pop("flat"), "is damaged (KeyError 'flat')"),
        (lambda found: found["environment"]["network"].update(hosts=2), "has 4 ranks on 2 hosts"),
        (lambda found: found["setting"].update(tokens=128), "do not measure the same work (tokens: 128 and 64)"),
    ],
)
def test_a_record_that_cannot_be_used_is_refused(change, sentence, made, refused):
    code, said = refused(made("good", syncs="flat"), edit(made("bad", syncs="flat") / "bench.json", change))
    assert code == 1
    assert sentence in said


def test_files_without_a_usable_bench_are_refused(tmp_path, made, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torn.json").write_text("{")
    assert "runs/ has no folder with a bench.json" in refused()[1]
    alone = made("alone", syncs="flat", ranks=1)
    for words, exit_code, sentence in (
        (["nowhere"], 1, "nowhere cannot be read"),
        (["torn.json"], 1, "torn.json is not JSON"),
        ([alone], 1, "Measure with 2 ranks or more"),
        ([alone, "--predict", alone], 2, "no other bench to predict these from"),
    ):
        code, said = refused(*words)
        assert code == exit_code
        assert sentence in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--to", "1"], "--to 1 is not valid. Give a number of hosts"),
        (["--rate", "fast"], "--rate fast"),
        (["--delay", "1"], "--delay 1"),
        (["--batch", "0"], "--batch 0"),
        (["-o", "scale.gif"], "ends in .svg, .png or .pdf"),
        (["--predict", "other", "--rate", "1gbit"], "Leave --rate out"),
    ],
)
def test_a_wrong_argument_is_refused_before_any_record_is_read(words, sentence, refused):
    code, said = refused("nowhere", *words)
    assert code == 2
    assert sentence in said


@pytest.mark.parametrize("form", ["svg", "png", "pdf"])
def test_the_drawing_is_written_in_the_form_of_its_name(form, made, tmp_path, scaled):
    pytest.importorskip("matplotlib", reason="drawing is an extra: pip install -e '.[report]' in the project's folder")
    path = tmp_path / f"scale.{form}"
    scaled(made("fast"), "--to", "16", "-o", path)
    assert path.read_bytes().startswith({"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}[form])


def test_without_matplotlib_one_sentence_says_how_to_install_it(made, tmp_path, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    code, said = refused(made("fast"), "-o", tmp_path / "scale.svg")
    assert code == 1
    assert "needs matplotlib" in said
    assert "pip install -e '.[report]'" in said


def test_the_numbers_are_written_as_json(made, tmp_path, scaled):
    path = tmp_path / "scale.json"
    assert "speed-up" in scaled(made("fast"), "--to", "4", "--batch", "8", "--json", path)
    found = json.loads(path.read_text())
    assert {point["hosts"] for point in found["points"]} == {1, 2, 4}
    assert all(point["extrapolated"] for point in found["points"])  # of this batch nothing was measured
    assert found["costs"]["efficiency"] == EFFICIENCY


def test_a_real_bench_s_record_is_scaled(start, tmp_path, scaled):
    words = ["-m", "cos598d", "bench", "--model", "tiny", "--world_size", 2, "--batch", 2, "--tokens", 16]
    words += ["--rounds", 2, "--sync", "all_reduce,bucketed+int8,sparse_rows", "--output", "out"]
    bench = start("bench", words, {"PYTHONPATH": str(ROOT)})
    assert bench.wait() == 0, bench.text
    record = load_record(tmp_path / "out")
    assert sum(tensor.bytes for tensor in record.tensors) == record.work["gradient_bytes"]
    moments = [record.compute.arrivals[tensor.name] for tensor in record.tensors]
    assert all(0 < moment <= record.compute.backward for moment in moments)
    assert moments[-1] < moments[0]  # the head's come first, the embeddings' last
    found = json.loads(scaled(tmp_path / "out", "--to", "8", "--rate", "1gbit", "--json", "-"))
    assert {point["sync"] for point in found["points"]} == {"all_reduce", "bucketed+int8", "sparse_rows", "none", "ddp"}
    assert all(0 < point["efficiency"] <= 1 for point in found["points"])
