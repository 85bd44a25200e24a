// Three sequences decode on a GPU, from raw pointers: a prompt each, then a token a step. First with
// calls on a stream, then with a CUDA graph of one step that is replayed while the lengths grow. Every
// step is checked against the CPU backend. `decode_gpu --cpu` makes the same calls over the host's
// memory, without the graph.
#include "decoder.h"
#include "place.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <random>
#include <vector>

constexpr int kSteps = 12;
const std::vector<int64_t> kPrompts{37, 5, 100}, kOneToken{1};

// Values are below 1: as bf16, a result is up to 2^-9 off, and each weight, whose sum is 1, up to 2^-8
// of itself.
constexpr float kTolerance = 0x1p-9f + 0x1p-8f;

// Numbers that bf16 holds, the same for every type. Queries are large enough for some keys to weigh
// more than others.
std::vector<Rows> random_rows(int64_t tokens, std::mt19937& random) {
    const auto draw = [&](int64_t count, float bound) {
        std::uniform_real_distribution<float> uniform(-bound, bound);
        std::vector<float> numbers(static_cast<size_t>(count));
        for (float& x : numbers) {
            x = from_bf16(to_bf16(uniform(random)));
        }
        return numbers;
    };
    std::vector<Rows> layers(kLayers);
    for (Rows& rows : layers) {
        rows = {draw(tokens * kRow, 4), draw(tokens * kKvRow, 1), draw(tokens * kKvRow, 1)};
    }
    return layers;
}

// Prints a line. Whether the two decoders' last steps agree.
bool agree(const char* name, const Decoder& tested, const Decoder& reference) {
    const std::vector<float> out = tested.results(), expected = reference.results();
    float largest = 0;
    size_t mistakes = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
        const float error = std::abs(out[i] - expected[i]);
        largest = std::max(largest, error);
        mistakes += !(error <= kTolerance);  // NaN is one
    }
    std::printf("%-7s lengths", name);
    for (const int32_t length : tested.lengths()) {
        std::printf(" %3d", length);
    }
    std::printf(", largest error %.1e: ", largest);
    std::printf(mistakes == 0 ? "OK\n" : "WRONG, %zu of %zu\n", mistakes, expected.size());
    return mistakes == 0;
}

// The launches of a step, as a graph.
GraphExec capture(const Decoder& decoder, cudaStream_t stream) {
    check_cuda(
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture"
    );
    decoder.decode();
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    const Graph owner(graph);
    cudaGraphExec_t executable = nullptr;
    check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    return GraphExec(executable);
}

// Prompts, then kSteps tokens, each launched by `step`. Whether all steps agree.
bool decode(
    const char* name, const std::function<void()>& step, Decoder& tested, Decoder& reference
) {
    std::mt19937 random(1);
    bool all_agree = true;
    for (Decoder* decoder : {&tested, &reference}) {
        decoder->restart();
    }
    const std::vector<Rows> prompts = random_rows(kPrefill.tokens, random);
    for (Decoder* decoder : {&tested, &reference}) {
        decoder->load(kPrompts, prompts);
        decoder->prefill();
    }
    all_agree &= agree("prompts", tested, reference);
    for (int i = 0; i < kSteps; ++i) {
        const std::vector<Rows> tokens = random_rows(kDecode.tokens, random);
        tested.load(kOneToken, tokens);
        step();
        reference.load(kOneToken, tokens);
        reference.decode();
        all_agree &= agree(name, tested, reference);
    }
    return all_agree;
}

bool run(bool on_cpu) {
    // fp32 and pages of another size: where a page or an offset is wrong, the two differ.
    Decoder reference(Place{}, pagetile::DType::kFloat32, /*page_size=*/4);
    OwnStream stream;
    Place place;
    if (!on_cpu) {
        stream = make_stream();
        place = {.device = {pagetile::DeviceKind::kCuda, 0}, .stream = stream.get()};
    }
    Decoder decoder(place, pagetile::DType::kBFloat16, /*page_size=*/16);
    bool all_agree = decode("calls", [&] { decoder.decode(); }, decoder, reference);
    if (on_cpu) {
        return all_agree;
    }
    const GraphExec graph = capture(decoder, stream.get());
    const auto replay = [&] {
        check_cuda(cudaGraphLaunch(graph.get(), stream.get()), "cudaGraphLaunch");
    };
    all_agree &= decode("graph", replay, decoder, reference);
    return all_agree;
}

int main(int argc, char** argv) try {
    const bool on_cpu = argc == 2 && std::strcmp(argv[1], "--cpu") == 0;
    if (argc > 1 && !on_cpu) {
        std::fprintf(stderr, "usage: decode_gpu [--cpu]\n");
        return 2;
    }
    if (!on_cpu && !has_gpu()) {
        std::puts("no GPU: nothing to run");
        return 0;
    }
    return run(on_cpu) ? 0 : 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "decode_gpu: %s\n", error.what());
    return 1;
}
