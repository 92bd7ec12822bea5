"""The published networks that turn observations of MiniHack or Procgen, or phi, into features.

`MiniHackTrunk` is that of E3B's experiments, `ImageTrunk` and `ShallowTrunk` are the large and the
small one of IMPALA; all end before the LSTM, which is `EpisodeLSTM`. They take a dict of tensors
that begin with M, as the vector environments give it.

[SOFE]    Castanyer et al. 2024, Improving Intrinsic Exploration by Creating Stationary Objectives
[E3B]     Henaff et al. 2022, Exploration via Elliptical Episodic Bonuses, appendix C.1.1
[IMPALA]  Espeholt et al. 2018, IMPALA: Scalable Distributed Deep-RL
"""

from functools import partial

import torch
import torch.nn as nn

OUTSIDE = 5976  # one more than the largest glyph of NetHack: beyond the edge of the map


def init_layer(layer, gain=2**0.5):
    """Orthogonal weights, zero biases: features of order one; sqrt 2 makes up for a ReLU.

    With PyTorch's own the features of two states differ by 0.001 to 0.004, which a critic's first
    targets easily outgrow: see docs/impala_e3b_sofe.md, Results.
    """
    if isinstance(layer, (nn.Conv2d, nn.Conv1d, nn.Linear)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)


class MiniHackTrunk(nn.Module):
    """Features (M, hidden_dim) of the map, what is near the agent, status and message. [E3B]

    With `crop_only` it is near cells and status alone: nine tenths of the work are in the CNN on
    the map of 21 x 79 cells and in that on the 256 characters of the message.
    """

    def __init__(self, hidden_dim, glyph_dim, crop_only=False):
        super().__init__()
        self.crop_only = crop_only
        self.glyph = nn.Embedding(OUTSIDE + 1, glyph_dim)
        self.crop_cnn = self.convolutions(glyph_dim)
        self.blstats = nn.Sequential(nn.Linear(27, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        features = 8 * 9 * 9 + 64
        if not crop_only:
            self.map_cnn = self.convolutions(glyph_dim)
            self.character = nn.Embedding(256, 32)
            layers, channels = [], 32
            for kernel, pool in ((7, 3), (7, 3), (3, 1), (3, 1), (3, 3)):  # 256 become 6
                layers += [nn.Conv1d(channels, 64, kernel), nn.ReLU(), nn.MaxPool1d(pool)]
                channels = 64
            layers += [nn.Flatten(), nn.Linear(6 * 64, 64), nn.ReLU()]
            self.message = nn.Sequential(*layers)
            features += 8 * 21 * 79 + 64
        layers = (
            nn.Linear(features, hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, hidden_dim),
            nn.ReLU(),
        )
        self.head = nn.Sequential(*layers)
        self.apply(init_layer)

    @staticmethod
    def convolutions(glyph_dim):
        layers, channels = [], glyph_dim
        for outputs in (16, 16, 16, 16, 8):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ELU(inplace=True)]
            channels = outputs
        return nn.Sequential(*layers, nn.Flatten())

    def forward(self, obs):
        glyphs, blstats = obs["glyphs"].long(), obs["blstats"]
        edged = nn.functional.pad(glyphs, (4, 4, 4, 4), value=OUTSIDE)  # (M, 29, 87)
        near = torch.arange(9, device=glyphs.device)
        each = torch.arange(len(glyphs), device=glyphs.device)[:, None, None]
        rows, columns = blstats[:, 1, None] + near, blstats[:, 0, None] + near  # (M, 9)
        crop = edged[each, rows[:, :, None], columns[:, None]]
        status = blstats.clamp(-255, 255) / 64.0  # the game's numbers go up to millions
        features = [
            self.crop_cnn(self.glyph(crop).permute(0, 3, 1, 2)),
            self.blstats(status),
        ]
        if not self.crop_only:
            features += [
                self.map_cnn(self.glyph(glyphs).permute(0, 3, 1, 2)),
                self.message(self.character(obs["message"].long()).transpose(1, 2)),
            ]
        return self.head(torch.cat(features, dim=1))


class ImageTrunk(nn.Module):
    """Features (M, hidden_dim) of an image (M, 3, 64, 64) of bytes. [IMPALA fig. 3, right]

    Each channel of an image is standardized first. Most of a maze's pixels are wall, of the same
    color in all states, and would leave little else in the features.
    """

    def __init__(self, hidden_dim):
        super().__init__()
        self.standardize, self.stages, inputs = nn.InstanceNorm2d(3), nn.ModuleList(), 3
        for channels in (16, 32, 32):
            convolution = partial(nn.Conv2d, kernel_size=3, padding=1)
            first, halve = convolution(inputs, channels), nn.MaxPool2d(3, stride=2, padding=1)
            blocks = [
                nn.Sequential(
                    nn.ReLU(),
                    convolution(channels, channels),
                    nn.ReLU(),
                    convolution(channels, channels),
                )
                for _ in range(2)
            ]
            self.stages.append(nn.ModuleList([nn.Sequential(first, halve), *blocks]))
            inputs = channels
        self.head = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(2048, hidden_dim), nn.ReLU())
        self.apply(init_layer)
        for (convolution, _), *blocks in self.stages:
            init_layer(convolution, gain=1)  # it has no ReLU
            for block in blocks:  # six of them, each of which would double the variance
                nn.init.zeros_(block[-1].weight)

    def forward(self, obs):
        x = self.standardize(obs["image"] / 255.0)
        for first, *blocks in self.stages:
            x = first(x)
            for block in blocks:
                x = x + block(x)
        return self.head(x)


class ShallowTrunk(nn.Sequential):
    """The same of two convolutions: a pass takes a twentieth of the time. [IMPALA fig. 3, left]"""

    def __init__(self, hidden_dim):
        layers = [nn.InstanceNorm2d(3), nn.Conv2d(3, 16, 8, stride=4), nn.ReLU()]
        layers += [nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.Flatten()]
        super().__init__(*layers, nn.Linear(32 * 6 * 6, hidden_dim), nn.ReLU())
        self.apply(init_layer)

    def forward(self, obs):
        return super().forward(obs["image"] / 255.0)


def flag_rules(args):
    """Flags that were set and are not of the game of args.env_id: rules for `runs.check_args`."""
    procgen = args.env_id == "procgen-maze"
    return [
        ("--shallow and --env-id: Procgen only", args.shallow and not procgen),
        ("--crop-only and --env-id: MiniHack only", args.crop_only and procgen),
        ("--penalty-step and --env-id: MiniHack only", args.penalty_step > 0 and procgen),
    ]


def make_trunk(args):
    """The trunk for the observations of args.env_id, of the sizes in args."""
    if args.env_id == "procgen-maze":
        return (ShallowTrunk if args.shallow else ImageTrunk)(args.hidden_dim)
    return MiniHackTrunk(args.hidden_dim, args.glyph_dim, args.crop_only)


class EpisodeLSTM(nn.LSTM):
    """An LSTM that forgets what came before a step that starts an episode."""

    def forward(self, features, starts, memory):
        """
        features   (T, K, D)
        starts     (T, K) bool   the step begins an episode
        memory     (2, K, L)     h and c before the first step; never written
        returns    outputs (T, K, L), and the memory after the last step
        """
        # nn.LSTM reads a stretch of steps at once: up to the next one that starts an episode.
        inner = starts[1:].any(1).nonzero().flatten().add(1).tolist() if len(starts) > 1 else []
        outputs = []
        for first, last in zip([0, *inner], [*inner, len(starts)], strict=True):
            h, c = memory.masked_fill(starts[first].unsqueeze(1), 0.0)
            output, state = super().forward(features[first:last], (h[None], c[None]))
            outputs.append(output)
            memory = torch.cat(state)
        return torch.cat(outputs), memory


class Encoder(nn.Module):
    """A trunk and a linear layer to psi, (M, d). [E3B]

    With `unit`, psi has mean 0, because what all states have in common tells none apart, and then
    length 1, so that no state is worth more than another for being long.
    """

    def __init__(self, args, unit):
        super().__init__()
        self.trunk, self.unit = make_trunk(args), unit
        self.last = nn.Linear(args.hidden_dim, args.embedding_dim)

    def forward(self, obs):
        x = self.last(self.trunk(obs))
        return nn.functional.normalize(x - x.mean(1, keepdim=True), dim=1) if self.unit else x


def make_phi_encoder(args):
    """Features (M, P) of phi: an MLP on the diagonal, the paper's CNN on the matrix."""
    d, P = args.embedding_dim, args.phi_dim
    if args.augment == "full":
        return MatrixEncoder(d, P, args.phi_channels, args.pool_stride)
    return nn.Sequential(nn.Linear(d, P), nn.ReLU(), nn.Linear(P, P), nn.ReLU())


class MatrixEncoder(nn.Module):
    """Features (M, features) of matrices (M, d, d), by five convolutions. [SOFE app:train_details]

    BatchNorm always uses its running statistics, in acting and learning, else V-trace would correct
    for a policy that nobody followed; `move_statistics` takes them a tenth towards a batch's.
    """

    def __init__(self, d, features, channels, pool_stride):
        super().__init__()
        layers, inputs, size = [nn.Unflatten(1, (1, d))], 1, d
        for _ in range(5):
            convolution, norm = nn.Conv2d(inputs, channels, 3, padding=1), nn.BatchNorm2d(channels)
            layers += [convolution, norm, nn.ReLU(), nn.MaxPool2d(2, pool_stride)]
            inputs, size = channels, (size - 2) // pool_stride + 1
        layers += [nn.Flatten(), nn.Linear(inputs * size**2, features), nn.ReLU()]
        self.layers = nn.Sequential(*layers).eval()

    def forward(self, matrices):
        return self.layers(matrices)

    @torch.no_grad()
    def move_statistics(self, matrices):
        self.layers.train()
        self.layers(matrices)
        self.layers.eval()
