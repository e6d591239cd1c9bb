// What tiles (AMX) do, in plain arithmetic: in place of `csrc/tile_instructions.h`, so that the kernels on tiles are tested
// where no processor has them. After Intel's Software Developer's Manual, volume 2, TDPBF16PS and TDPBSUD. Where a processor
// would fault the process ends.

static thread_local TileShapes emulated_shapes;
static thread_local uint32_t emulated_tiles[8][TILE][TILE];

static void must(bool held, const char *what) {
  if (held) return;
  const auto ignored = write(2, what, __builtin_strlen(what));
  (void)ignored;
  __builtin_trap();
}

static int emulated_rows(int tile) { return emulated_shapes.rows[tile]; }
static int emulated_words(int tile) { return emulated_shapes.row_bytes[tile] / 4; }

static void use_shapes(const TileShapes &shapes) {
  must(shapes.palette == 1, "tiles of a palette that is not 1\n");
  for (int i = 0; i < 8; i++)
    must(shapes.rows[i] <= TILE && shapes.row_bytes[i] <= TILE * 4, "a tile of more rows or bytes than there are\n");
  emulated_shapes = shapes;
  __builtin_memset(emulated_tiles, 0, sizeof emulated_tiles);
}

static void end_tiles() { emulated_shapes = {}; }

static void must_be(int tile) {
  must(emulated_shapes.palette && emulated_rows(tile) && emulated_words(tile), "a tile without a shape\n");
}

template <int N>
static void clear_tile() {
  must_be(N);
  __builtin_memset(emulated_tiles[N], 0, sizeof emulated_tiles[N]);
}

template <int N>
static void load_tile(const void *p, int64_t stride) {
  clear_tile<N>();
  for (int row = 0; row < emulated_rows(N); row++)
    __builtin_memcpy(emulated_tiles[N][row], (const char *)p + row * stride, emulated_words(N) * 4);
}

template <int N>
static void store_tile(void *p, int64_t stride) {
  must_be(N);
  for (int row = 0; row < emulated_rows(N); row++)
    __builtin_memcpy((char *)p + row * stride, emulated_tiles[N][row], emulated_words(N) * 4);
}

static void must_fit(int sum, int a, int b) {
  must_be(sum), must_be(a), must_be(b);
  must(emulated_rows(sum) == emulated_rows(a) && emulated_words(sum) == emulated_words(b) &&
           emulated_words(a) == emulated_rows(b),
       "a product of tiles that do not fit\n");
}

struct PairTiles {
  template <int SUM, int A, int B>
  static void add() {
    must_fit(SUM, A, B);
    for (int m = 0; m < emulated_rows(A); m++) {
      float first[TILE] = {}, second[TILE] = {};
      for (int k = 0; k < emulated_words(A); k++) {
        const uint32_t pair = emulated_tiles[A][m][k];
        for (int n = 0; n < TILE; n++) {
          const uint32_t other = emulated_tiles[B][k][n];
          first[n] += of(pair << 16) * of(other << 16);
          second[n] += of(pair >> 16 << 16) * of(other >> 16 << 16);
        }
      }
      for (int n = 0; n < TILE; n++) {
        const float sum = of(emulated_tiles[SUM][m][n]) + (first[n] + second[n]);
        __builtin_memcpy(&emulated_tiles[SUM][m][n], &sum, sizeof sum);
      }
    }
  }

 private:
  static float of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
  }
};

struct ByteTiles {
  template <int SUM, int A, int B>
  static void add() {
    must_fit(SUM, A, B);
    for (int m = 0; m < emulated_rows(A); m++)
      for (int k = 0; k < emulated_words(A); k++)
        for (int n = 0; n < TILE; n++) {
          const uint32_t four = emulated_tiles[A][m][k], others = emulated_tiles[B][k][n];
          int32_t products = 0;
          for (int i = 0; i < 32; i += 8) products += (int8_t)(four >> i) * (int32_t)(uint8_t)(others >> i);
          emulated_tiles[SUM][m][n] += (uint32_t)products;
        }
  }
};

static bool tiles_granted() { return true; }
