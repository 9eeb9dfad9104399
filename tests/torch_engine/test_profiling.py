"""Profiler traces."""

import json

import pytest


@pytest.mark.promise("CLI_16")
def test_traces_are_written(run, tmp_path):
    run(max_steps=4, profile=True, profiling_output=str(tmp_path / "traces"), with_shapes=True)
    traces = list((tmp_path / "traces").glob("trace-*.json"))
    assert traces and "traceEvents" in json.loads(traces[0].read_text())
