import threading

PATH = "/v1/completions"


def test_a_paused_server_rejects_new_requests_until_it_is_resumed(house):
    assert house.client.post("/pause").json() == {"paused": True, "open_requests": 0}
    rejected = house.client.post(PATH, json={"prompt": "x", "max_tokens": 1})
    assert (rejected.status_code, rejected.json()["error"]["code"]) == (503, "paused")
    assert int(rejected.headers["retry-after"]) >= 1
    ready = house.client.get("/health/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "paused")
    assert house.client.get("/health").status_code == 200
    assert house.client.post("/resume").json()["paused"] is False
    assert house.client.post(PATH, json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert house.client.get("/health/ready").status_code == 200


def test_a_request_that_runs_finishes_during_the_pause(house):
    house.runner.gate.clear()
    answers = []
    body = {"prompt": "x", "max_tokens": 3}
    running = threading.Thread(target=lambda: answers.append(house.client.post(PATH, json=body)))
    running.start()
    while not house.service.open_requests():
        pass
    assert house.client.post("/pause").json() == {"paused": True, "open_requests": 1}
    house.runner.gate.set()
    running.join(60)
    assert answers[0].status_code == 200
