"""Every recipe is captured and still after the gate, and decoding on a GPU is lossless."""

import pytest
import torch
import transformers

from trainer.decoding import Decoder, Sampling
from trainer.reference import plain_losses

pytestmark = pytest.mark.gpu

RECIPES = {
    "dpace": {"optim": {"loss_weights": "dpace"}},
    "distillation": {"optim": {"loss_labels": "logits"}},
    "muon": {"optim": {"optimizer": "muon", "weight_decay": 0.1}},
    "noise": {"draft": {"feature_noise": 0.05}},
    "sliding": {"draft": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_a_plain_eager_loop_and_still(config, train, load, recipe):
    run = config("0", "0", **RECIPES[recipe])
    told = train(run)
    losses = [event["loss"] for event in told if event["event"] == "step"]
    assert losses == pytest.approx(plain_losses(run, load(run), 24), rel=5e-3 if recipe == "muon" else 1e-3)
    last = told[-1]
    assert (last["event"], last["captures_after_gate"], last["recompiles"]) == ("finished", 0, 0)
    assert all(gpu["device_allocs_after_gate"] == 0 for gpu in last["gpus"].values())


def test_greedy_decoding_with_a_drafter_is_lossless(config, load):
    device = torch.device("cuda:0")
    drafter = load(config("0", "0")).initial.to(device)
    torch.manual_seed(0)
    shape = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    qwen = transformers.Qwen3Config(**shape, **heads, initializer_range=0.3, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(qwen, dtype=torch.float32).eval().to(device)
    with torch.no_grad():
        model.get_output_embeddings().weight[4:] *= 0.01  # few tokens are ever likely, so some of those drafted are right
    greedy = Sampling(0.0, torch.Generator(device))
    decoder = Decoder(model, 700, drafter)
    num_accepted = num_drafted = 0
    for first, num_prompt in ((0, 9), (1, 250), (2, 300), (3, 10)):  # each other number of keys is a graph of its own
        prompt = list(range(first, first + num_prompt))
        plain = decoder.decode(prompt, 380, {511}, greedy)
        drafted = decoder.decode_with_drafter(prompt, 380, {511}, greedy)
        assert len(plain.tokens) == 380
        assert drafted.tokens == plain.tokens
        num_accepted += sum(verification.num_accepted for verification in drafted.rounds)
        num_drafted += sum(verification.num_drafted for verification in drafted.rounds)
    assert 0 < num_accepted < num_drafted
