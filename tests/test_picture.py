"""`picture`: the lanes of a sync's step and a ring's messages, step by step, from real ranks."""

from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"


def test_the_ring_step_by_step(command, tmp_path):
    code, text = command("picture", "--sync", "ring", "--world_size", "3", "-o", "ring.svg")
    assert code == 0, text
    # 2(n-1) steps, in each of which every rank sends a third of 840 elements to its neighbour.
    steps = [line for line in text.splitlines() if line.startswith("Step ")]
    assert len(steps) == 4, text
    assert all("3 messages of up to 1,120 bytes" in line for line in steps), text
    assert [line.rpartition(", ")[2] for line in steps] == ["added up.", "added up.", "copied.", "copied."]
    assert "Every rank has the complete sum." in text
    drawing = ElementTree.parse(tmp_path / "ring.svg").getroot()
    assert drawing.tag == f"{SVG}svg"
    titles = {element.text for element in drawing.iter(f"{SVG}title")}
    assert titles == {"rank 0 to rank 1", "rank 1 to rank 2", "rank 2 to rank 0"}


def test_lanes_of_a_sync_without_messages(command, tmp_path):
    code, text = command("picture", "--sync", "flat", "--world_size", "2", "-o", "flat.svg")
    assert code == 0, text
    assert "message by message" not in text
    drawing = ElementTree.parse(tmp_path / "flat.svg").getroot()
    assert [each.text for each in drawing.iter(f"{SVG}text")][1:3] == ["rank 0", "rank 1"]
    titles = [element.text for element in drawing.iter(f"{SVG}title")]
    assert any("all_reduce of" in title and "2100204 bytes" in title for title in titles), titles
