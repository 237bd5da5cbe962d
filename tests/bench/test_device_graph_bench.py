import json

from bench import device_graph


def test_small_form_writes_a_row_for_each_case(tmp_path):
    rows = device_graph.main(["--small", "--device", "cpu", "--out", str(tmp_path)])
    assert [(row["lists"], row["form"]) for row in rows] == [(8, "torch"), (32, "torch")]
    assert rows[1]["terms"] == 4 * rows[0]["terms"]
    (file,) = tmp_path.glob("device_graph-*.json")
    assert json.loads(file.read_text())["rows"] == rows
