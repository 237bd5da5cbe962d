"""What is asked of Inductor's CUDA graphs, what they did, and what runs under somebody else's capture.

Work on a side stream cannot break a recording here: the package makes no stream, and records its one event between steps.
"""

import types

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

import ckv_compile.ops  # noqa: F401
from ckv_compile import backend
from ckv_compile.config import CommunityConfig
from ckv_compile.errors import CaptureError
from ckv_compile.runtime import cuda_graphs
from ckv_compile.runtime.cuda_graphs import CudaGraphs

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def plan(device=CUDA, phase="decode"):
    return types.SimpleNamespace(geometry=types.SimpleNamespace(device=device), phase=phase)


def refusal(plan, options=None, mode=None, graph=None):
    config, inductors = CommunityConfig.from_options(options)
    patches = backend.inductor_patches(config, mode, inductors)
    return backend._why_not_captured(graph or fx.Graph(), plan, config, mode, patches)


class TestWhatIsAskedFor:
    @pytest.mark.parametrize("mode", [None, "reduce-overhead", "max-autotune"])
    def test_decode_graphs_on_cuda_are_recorded(self, mode):
        assert refusal(plan(), mode=mode) is None

    @pytest.mark.parametrize(
        ("where", "options", "mode", "reason"),
        [
            (plan(CPU), None, None, "it runs on the cpu"),
            (plan(phase="prefill"), None, "reduce-overhead", "a prefill hands keys to the host"),
            (plan(), {"cuda_graphs": False}, "reduce-overhead", "options['cuda_graphs'] is False"),
            (plan(), {"triton.cudagraphs": False}, None, "options['triton.cudagraphs'] is False"),
            (plan(), None, "max-autotune-no-cudagraphs", "mode is 'max-autotune-no-cudagraphs'"),
        ],
    )
    def test_others_are_not_and_the_reason_is_told(self, where, options, mode, reason):
        assert refusal(where, options, mode) == reason
        assert CudaGraphs(reason).verdict() == f"not captured: {reason}"

    def test_an_operator_without_a_kernel_is_named(self):
        graph = fx.Graph()
        graph.call_function(torch.ops.ckv.assign_tokens.default, ())
        lowered = backend._host_operator(graph) is None
        assert lowered or "ckv.assign_tokens.default" in refusal(plan(), graph=graph)

    def test_an_operator_that_waits_for_the_device_runs_beside_the_recording(self):
        """Experts of float16 and float32 take their sizes from the device to the host; Inductor is not told so."""
        grouped = pytest.importorskip("transformers.integrations.moe")
        assert grouped.torch.ops.transformers.grouped_mm_fallback
        graph = fx.Graph()
        graph.call_function(torch.ops.transformers.grouped_mm_fallback.default, ())
        name = "transformers::grouped_mm_fallback"
        patches = backend.inductor_patches(CommunityConfig(), None, {"custom_should_partition_ops": ["mine::op"]})
        assert patches["custom_should_partition_ops"] == ["mine::op", name]
        again = backend.inductor_patches(CommunityConfig(), None, patches)
        assert again["custom_should_partition_ops"] == ["mine::op", name]
        assert refusal(plan(), {"graph_partition": True}, graph=graph) is None
        assert name in refusal(plan(), {"graph_partition": False}, graph=graph)

    def test_a_size_that_changes_is_named_but_the_batch_may_change(self):
        def trace(ids, cache):
            return ids + 1, cache.sum()

        seen = []

        def keep(gm, inputs):
            for node in gm.graph.nodes:
                if node.op == "placeholder" and isinstance(node.meta["example_value"], torch.Tensor):
                    node.name = "ckv_first" if node.meta["example_value"].dim() == 1 else "cache"
            seen.append(backend._sizes_of_inputs(gm.graph))
            return gm.forward

        torch._dynamo.reset()
        ids, cache = torch.ones(3), torch.ones(3, 5)
        torch._dynamo.mark_dynamic(ids, 0)
        torch._dynamo.mark_dynamic(cache, 0)
        torch.compile(lambda ids, cache: trace(ids, cache[: ids.shape[0]]), backend=keep)(ids, cache)
        torch._dynamo.reset()
        ids, cache = torch.ones(3), torch.ones(2, 5)
        torch._dynamo.mark_dynamic(cache, 1)
        torch.compile(trace, backend=keep)(ids, cache)
        torch._dynamo.reset()
        assert len(seen[1]) == 1


class TestWhatInductorDid:
    def compile(self, graphs, replay, model, skips=(), monkeypatch=None):
        def cudagraphify(model, static_input_idxs=(), **kwargs):
            return replay

        monkeypatch.setattr(compile_fx, "cudagraphify", cudagraphify)

        def compiling():
            for reason in skips:
                log_cudagraph_skip_and_bump_counter(reason)
            function = compile_fx.cudagraphify(model, (0,), device_index=0)
            return lambda *args: function(list(args))

        compiled = graphs.compile(compiling)
        assert compile_fx.cudagraphify is cudagraphify
        return compiled

    def test_a_recorded_graph_is_reported(self, monkeypatch):
        graphs = CudaGraphs()
        self.compile(graphs, lambda inputs: inputs, None, monkeypatch=monkeypatch)
        assert graphs.verdict() == "captured"

    def test_inductors_own_reason_is_reported(self, monkeypatch):
        graphs = CudaGraphs()
        self.compile(
            graphs, None, None, ["skipping cudagraphs due to mutated inputs (2 instances)"], monkeypatch=monkeypatch
        )
        assert graphs.verdict() == "not captured: mutated inputs (2 instances)"

    def test_a_reason_that_shows_at_the_first_call_is_reported(self, monkeypatch):
        def replay(inputs):
            log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to mutated inputs")
            return inputs

        graphs = CudaGraphs()
        compiled = self.compile(graphs, replay, None, monkeypatch=monkeypatch)
        for _ in range(5):
            compiled(torch.ones(1))
        assert graphs.skipped == ["mutated inputs"]

    def test_a_skip_without_a_message_is_reported(self, monkeypatch):
        def replay(inputs):
            counters["inductor"]["cudagraph_skips"] += 1
            return inputs

        graphs = CudaGraphs()
        self.compile(graphs, replay, None, monkeypatch=monkeypatch)(torch.ones(1))
        assert "TORCH_LOGS" in graphs.verdict()

    def test_nothing_recorded_is_reported(self):
        graphs = CudaGraphs()
        graphs.compile(lambda: len)
        assert graphs.verdict() == "not captured: Inductor found nothing to record"

    def test_under_a_callers_capture_the_kernels_are_launched_without_the_trees(self, monkeypatch):
        compiled = self.compile(
            CudaGraphs(), lambda inputs: "replayed", lambda inputs: "launched", monkeypatch=monkeypatch
        )
        assert compiled(torch.ones(1)) == "replayed"
        monkeypatch.setattr(cuda_graphs, "capturing", lambda: True)
        assert compiled(torch.ones(1)) == "launched"
        monkeypatch.setattr(cuda_graphs, "capturing", lambda: False)
        assert compiled(torch.ones(1)) == "replayed"


class TestOutputs:
    def test_what_the_next_replay_overwrites_is_cloned_and_a_view_of_an_input_is_not(self):
        own, state = torch.ones(3), torch.ones(4)
        graphs = CudaGraphs(None, [(0, None), (1, 0), (2, 0)])
        graphs.parts = 1
        kept = graphs.keep([own, state[1:], own, 5], [state])
        own.fill_(7)
        state.fill_(9)
        assert [kept[0][0], kept[1][0], kept[2][0], kept[3]] == [1, 9, 1, 5]

    def test_a_graph_that_is_not_recorded_keeps_its_outputs(self):
        results = [torch.ones(3)]
        assert CudaGraphs("the cpu", [(0, None)]).keep(results, []) is results


def test_require_no_capture_says_what_to_do(monkeypatch):
    cuda_graphs.require_no_capture("a prefill")
    monkeypatch.setattr(cuda_graphs, "capturing", lambda: True)
    with pytest.raises(CaptureError, match=r"a prefill cannot be captured .* run one decode step"):
        cuda_graphs.require_no_capture("a prefill")
    assert issubclass(CaptureError, RuntimeError)
