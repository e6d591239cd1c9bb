import pytest


@pytest.mark.parametrize("prompt", ["messages", 'say "messages": []', "hi fox"])
def test_a_text_is_tokenized_whatever_it_says(house, prompt):
    answer = house.client.post("/tokenize", json={"prompt": prompt, "add_special_tokens": False})
    assert answer.json()["tokens"] == house.model.tokenizer.encode(prompt, add_special_tokens=False)


def test_a_conversation_is_tokenized_as_a_call_would(house):
    body = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
    reported = house.client.post("/tokenize", json=body).json()
    assert house.model.tokenizer.decode(reported["tokens"]) == "[user] hi\n[assistant] "
    assert len(reported["token_strs"]) == reported["count"]
