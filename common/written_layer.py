"""A layer of the key-value cache with room for more tokens."""

import torch
from transformers.cache_utils import DynamicLayer


class WrittenLayer(DynamicLayer):
    """The layer of a cache with room for more tokens: keys and values of a new one are written behind those that are
    there, where the library copies all of them. Rows that move are copied, those that stay are not.

    keys, values (B, heads, T, size) are the used part of the buffers.
    """

    def __init__(self, layer, room):
        super().__init__()
        self.dtype = layer.keys.dtype
        self.device = layer.keys.device
        if torch.is_autocast_enabled(self.device.type):
            self.dtype = torch.get_autocast_dtype(self.device.type)  # what attention casts them to
        self.is_initialized = True
        keys = self.with_room(layer.keys, room)
        values = self.with_room(layer.values, room)
        self.buffers = [keys, values]
        rows, _, length, _ = layer.keys.shape
        self.use(rows, length)

    def with_room(self, states, room):
        """A buffer (B, heads, T + room, size) that begins with states."""
        rows, heads, length, size = states.shape
        longer = length + room
        shape = rows, heads, longer, size
        buffer = torch.empty(shape, dtype=self.dtype, device=self.device)
        buffer[:, :, :length] = states
        return buffer

    def use(self, rows, length):
        """Sets the part of the buffers that is used."""
        keys, values = self.buffers
        self.keys = keys[:rows, :, :length]
        self.values = values[:rows, :, :length]

    def update(self, key_states, value_states, *args, **options):
        rows, _, begin, _ = self.keys.shape
        end = begin + key_states.shape[2]
        self.use(rows, end)
        self.keys[:, :, begin:] = key_states
        self.values[:, :, begin:] = value_states
        return self.keys, self.values

    def reorder_cache(self, rows):
        places = torch.arange(len(rows), device=self.device)
        moving = (rows != places).nonzero()[:, 0]
        for states in (self.keys, self.values):
            states[moving] = states[rows[moving]]
        self.use(len(rows), self.keys.shape[2])
