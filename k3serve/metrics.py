"""What the server counts, in Prometheus text; vLLM's names where the meaning is the same.

Rule: one registry per Metrics object, no module globals; a layer that counts is handed the object.
Try it: curl -s localhost:8000/metrics
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from k3serve.types import DraftStats, TickTimes

_LABELS = ("model_name", "engine")
_LATENCY = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 30, 60, 300)
_GAPS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_STEP_TOKENS = (1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 6.5, 7, 7.5, 8)
_CHOICES = (1, 2, 4, 8, 16, 32, 64, 128)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
TICK_PHASES = tuple(f.name for f in fields(TickTimes) if f.name != "device_idle")


class Metrics:
    """Counters and histograms of one server. Thread-safe."""

    def __init__(self, model_name: str = "") -> None:
        self.registry = CollectorRegistry()
        self._labels = (model_name, "0")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens answered.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._success = Counter(
            "vllm:request_success",
            "Requests ended, by finish reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self.prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_hits = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens that need not be computed."
        )
        self.rejections = self._counter("vllm:admission_rejections", "Requests refused by load.")
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From the request to its first token.", _LATENCY
        )
        self.inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of one sequence.", _GAPS
        )
        self.e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "From the request to its last token.", _LATENCY
        )
        self.request_prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a sequence.", _TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated for a sequence.", _TOKENS
        )
        self.time_per_output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of a sequence.",
            _GAPS,
        )
        self.request_params_n = self._histogram(
            "vllm:request_params_n", "Choices asked for by a request.", _CHOICES
        )
        self.request_params_max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "Token budget of a sequence.", _TOKENS
        )
        self.iteration_tokens = self._histogram(
            "vllm:iteration_tokens_total", "Prompt and generated tokens of a busy tick.", _TOKENS
        )
        self.drafts = self._counter(
            "vllm:spec_decode_num_drafts", "Decode steps of a sequence that had drafts to verify."
        )
        self.draft_tokens = self._counter(
            "vllm:spec_decode_num_draft_tokens", "Draft tokens verified."
        )
        self.accepted_tokens = self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted and emitted."
        )
        self._accepted_per_pos = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted and emitted, by their place in a step; the first is 0.",
            (*_LABELS, "position"),
            registry=self.registry,
        )
        self.acceptance_length = self._histogram(
            "k3serve_draft_acceptance_length",
            "Mean tokens of a decode step, of each sequence that had drafts.",
            _STEP_TOKENS,
        )
        self.http_responses = Counter(
            "k3serve_http_responses",
            "HTTP answers, by status.",
            ("status",),
            registry=self.registry,
        )
        self.compilations_after_ready = Counter(
            "k3serve_compilations_after_ready",
            "Programs compiled after the server said it was ready; stays 0.",
            registry=self.registry,
        )
        self.ticks = Counter("k3serve_ticks", "Ticks read back.", registry=self.registry)
        self._tick_seconds = Counter(
            "k3serve_tick_seconds",
            "Time of the engine thread while there is work, by phase; all but wait is the host's.",
            ("phase",),
            registry=self.registry,
        )
        self._phases = {phase: self._tick_seconds.labels(phase) for phase in TICK_PHASES}
        self.device_idle = Counter(
            "k3serve_device_idle_seconds",
            "Time in which work was to be done and the device had no tick queued; at most so much.",
            registry=self.registry,
        )
        ProcessCollector(registry=self.registry)  # memory, descriptors, CPU time; on Linux
        threads = Gauge("k3serve_threads", "Python threads.", registry=self.registry)
        threads.set_function(threading.active_count)

        self.engine_memory = Gauge(
            "k3serve_engine_resident_memory_bytes",
            "Memory of the engine's process; 0 where that is the same process.",
            registry=self.registry,
        )
        self.engine_restarts = Counter(
            "k3serve_engine_restarts",
            "Engines started again after a failure.",
            registry=self.registry,
        )
        self.resumed_requests = Counter(
            "k3serve_resumed_requests",
            "Requests that went on in another engine.",
            registry=self.registry,
        )

    def _counter(self, name: str, doc: str) -> Counter:
        return Counter(name, doc, _LABELS, registry=self.registry).labels(*self._labels)

    def _histogram(self, name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, doc, _LABELS, registry=self.registry, buckets=buckets)
        return made.labels(*self._labels)

    def watch_load(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Reads both numbers whenever somebody asks for the metrics. Once per Metrics."""
        for name, doc, read in (
            ("vllm:num_requests_running", "Sequences in slots.", running),
            ("vllm:num_requests_waiting", "Sequences that wait for a slot.", waiting),
        ):
            gauge = Gauge(name, doc, _LABELS, registry=self.registry)
            gauge.labels(*self._labels).set_function(read)

    def ticked(self, times: TickTimes, tokens: int, compilations: int) -> None:
        """One tick came back: where the time since the one before it went, its prompt and
        generated tokens, and programs compiled meanwhile.
        """
        self.ticks.inc()
        if tokens:
            self.iteration_tokens.observe(tokens)
        self.compilations_after_ready.inc(compilations)
        for phase, counter in self._phases.items():
            counter.inc(getattr(times, phase))
        self.device_idle.inc(times.device_idle)

    def finished(self, reason: str) -> None:
        """One sequence ended: stop, length, abort or error."""
        self._success.labels(*self._labels, reason).inc()

    def drafted(self, stats: DraftStats) -> None:
        """What drafting did for one sequence that ended."""
        if not any(stats.offered):
            return
        accepted = sum(stats.accepted)
        self.drafts.inc(stats.offered[0])  # every step with drafts has a first one
        self.draft_tokens.inc(sum(stats.offered))
        self.accepted_tokens.inc(accepted)
        for position, count in enumerate(stats.accepted):
            self._accepted_per_pos.labels(*self._labels, str(position)).inc(count)
        self.acceptance_length.observe(1 + accepted / max(1, stats.steps))

    def render(self) -> tuple[str, bytes]:
        """Content type and body of GET /metrics."""
        return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self.registry)
