from headrace.observe.metrics_page import MetricsPage


def test_process_metrics_have_the_names_that_dashboards_know() -> None:
    page = MetricsPage("headrace", {"model_name": "toy"})
    page.add_process()
    text = page.render().decode()
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"):
        assert f"\n{name} " in text
    assert "python_gc_collections_total{generation=" in text


def test_values_are_measured_when_the_page_is_rendered() -> None:
    page = MetricsPage()
    gauge = page.gauge("size", "A size.").of()
    page.before_render(lambda: setattr(gauge, "value", gauge.value + 1))
    assert "headrace:size 1.0" in page.render().decode()
    assert "headrace:size 2.0" in page.render().decode()
