"""The published networks: what each part sees, and psi of length 1."""

from functools import partial

import pytest
import torch

from common.trunks import OUTSIDE, Encoder, EpisodeLSTM, ImageTrunk, MiniHackTrunk, make_trunk
from impala_e3b_sofe import Args


def minihack_obs(M=3):
    torch.manual_seed(0)
    blstats = torch.zeros(M, 27, dtype=torch.int64)
    blstats[:, 0], blstats[:, 1] = torch.tensor([0, 40, 78]), torch.tensor([0, 10, 20])
    glyphs = torch.randint(0, OUTSIDE, (M, 21, 79), dtype=torch.int16)
    return {
        "glyphs": glyphs,
        "blstats": blstats,
        "message": torch.randint(0, 256, (M, 256), dtype=torch.uint8),
    }


def test_the_crop_is_what_is_near_the_agent():
    trunk, obs, seen = MiniHackTrunk(8, 2), minihack_obs(), []
    trunk.glyph.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    assert trunk(obs).shape == (3, 8)
    crop, whole = seen
    assert torch.equal(whole, obs["glyphs"].long()) and crop.shape == (3, 9, 9)
    for i, (column, row) in enumerate(obs["blstats"][:, :2].tolist()):
        for dy in range(-4, 5):
            for dx in range(-4, 5):
                y, x = row + dy, column + dx
                inside = 0 <= y < 21 and 0 <= x < 79
                expected = obs["glyphs"][i, y, x].item() if inside else OUTSIDE
                assert crop[i, dy + 4, dx + 4] == expected


@pytest.mark.parametrize("part", ["glyphs", "blstats", "message"])
def test_every_part_of_the_observation_counts_for_its_own_state_only(part):
    trunk, obs = MiniHackTrunk(16, 4), minihack_obs()
    before = trunk(obs)
    changed = obs | {part: obs[part].clone()}
    changed[part][1].fill_(5)
    after = trunk(changed)
    assert not torch.allclose(before[1], after[1])
    assert torch.allclose(before[[0, 2]], after[[0, 2]], atol=1e-6)


def test_crop_only_sees_what_is_near_alone():
    trunk, obs = make_trunk(Args(hidden_dim=16, glyph_dim=4, crop_only=True)), minihack_obs()
    assert trunk(obs).shape == (3, 16)
    far, near = (obs | {"glyphs": obs["glyphs"].clone()} for _ in range(2))
    far["glyphs"][1, 10, 45] += 1  # five columns to the right of the agent
    near["glyphs"][1, 10, 44] += 1
    far["message"] = obs["message"] + 1
    assert torch.equal(trunk(far), trunk(obs)) and not torch.equal(trunk(near), trunk(obs))


def test_huge_numbers_of_the_status_line_are_bounded():
    trunk, obs = MiniHackTrunk(8, 2), minihack_obs()
    obs["blstats"][:, 9] = 10**9
    large = trunk(obs)
    obs["blstats"][:, 9] = 255
    assert torch.equal(trunk(obs), large)


def test_the_image_trunk():
    trunk = ImageTrunk(16)
    image = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    features = trunk({"image": image})
    assert features.shape == (2, 16) and (features >= 0).all()
    convolutions = [m for m in trunk.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == 15
    assert sum(p.numel() for p in trunk.parameters()) == 97600 + 2048 * 16 + 16
    assert isinstance(make_trunk(Args(env_id="procgen-maze", hidden_dim=16)), ImageTrunk)
    assert isinstance(make_trunk(Args(hidden_dim=16, glyph_dim=4)), MiniHackTrunk)


def test_the_image_trunk_by_hand():
    """[IMPALA fig. 3]: three stages of a convolution, a pooling and two residual blocks."""
    trunk, f = ImageTrunk(16), torch.nn.functional
    for parameter in trunk.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    image = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    x = image / 255.0
    variance, mean = torch.var_mean(x, (2, 3), keepdim=True, correction=0)
    x = (x - mean) / (variance + 1e-5).sqrt()
    convolutions = [m for m in trunk.modules() if isinstance(m, torch.nn.Conv2d)]
    layers = iter(
        [partial(f.conv2d, weight=m.weight, bias=m.bias, padding=1) for m in convolutions]
    )
    for _ in range(3):
        x = f.max_pool2d(next(layers)(x), 3, stride=2, padding=1)
        for _ in range(2):
            inner = next(layers)(x.relu())
            x = x + next(layers)(inner.relu())
    features = f.linear(x.relu().flatten(1), trunk.head[2].weight, trunk.head[2].bias).relu()
    torch.testing.assert_close(trunk({"image": image}), features, rtol=1e-4, atol=1e-3)
    assert next(layers, None) is None and (features > 0).any()


PROCGEN = {"env_id": "procgen-maze"}


@pytest.mark.parametrize(
    "settings", [{}, {"crop_only": True}, PROCGEN, PROCGEN | {"shallow": True}]
)
def test_states_are_told_apart_from_the_start(settings):
    """With PyTorch's own weights the deviation over states is 0.01, and a critic outgrows it."""
    image = torch.full((3, 3, 64, 64), 180, dtype=torch.uint8)  # walls, and little else
    image[:, :, 8:24, 16:32] = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    obs = minihack_obs() | {"image": image}
    trunk = make_trunk(Args(hidden_dim=64, glyph_dim=8, **settings))
    assert 0.05 < trunk(obs).std(0).mean() < 2
    assert trunk(obs).mean() < 2


def test_the_shallow_trunk_by_hand():
    """Its convolutions as sums over the patches of 8 x 8 pixels, and of 4 x 4 of their outputs."""
    trunk = make_trunk(Args(env_id="procgen-maze", hidden_dim=16, shallow=True))
    image = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    x = image / 255.0
    variance, mean = torch.var_mean(x, (2, 3), keepdim=True, correction=0)
    x = (x - mean) / (variance + 1e-5).sqrt()
    for layer, size, stride in ((trunk[1], 8, 4), (trunk[3], 4, 2)):
        patches = x.unfold(2, size, stride).unfold(3, size, stride)  # (M, C, H, W, size, size)
        x = torch.einsum("mchwij,ocij->mohw", patches, layer.weight).relu()
    features = (x.flatten(1) @ trunk[6].weight.T).relu()
    assert trunk[1].weight.shape == (16, 3, 8, 8) and trunk[3].weight.shape == (32, 16, 4, 4)
    torch.testing.assert_close(trunk({"image": image}), features)


@pytest.mark.parametrize("T", [1, 9])
def test_the_memory_is_of_the_present_episode(T):
    """Against one step after the other, with the memory set to 0 where an episode starts."""
    torch.manual_seed(0)
    lstm, K = EpisodeLSTM(4, 5), 3
    features, memory = torch.randn(T, K, 4), torch.randn(2, K, 5)
    starts, kept = torch.rand(T, K) < 0.3, memory.clone()
    outputs, last = lstm(features, starts, memory)
    assert torch.equal(memory, kept) and outputs.shape == (T, K, 5)
    plain = torch.nn.LSTM(4, 5)
    plain.load_state_dict(lstm.state_dict())
    for k in range(K):
        state = [x[None, None, k] for x in memory]
        for t in range(T):
            if starts[t, k]:
                state = [torch.zeros(1, 1, 5)] * 2
            output, state = plain(features[t, k][None, None], tuple(state))
            assert torch.allclose(outputs[t, k], output[0, 0], atol=1e-6)
        assert torch.allclose(last[:, k], torch.cat(state)[:, 0], atol=1e-6)


def test_an_embedding_of_length_1_and_mean_0():
    obs = minihack_obs()
    args = Args(hidden_dim=16, glyph_dim=4, embedding_dim=12)
    psi = Encoder(args, unit=True)(obs)
    assert torch.allclose(psi.norm(dim=1), torch.ones(3)) and psi.mean(1).abs().max() < 1e-6
    raw = Encoder(args, unit=False)(obs)
    assert (raw.norm(dim=1) - 1).abs().min() > 1e-3
