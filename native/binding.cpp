// The Python module: arrays in, arrays out; everything is checked by Runner and Cache.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <string>

#include "runner.h"

namespace nb = nanobind;
using namespace outpace;

namespace {

template <class T, int dims>
using Array = nb::ndarray<T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;

// Reads packed tensors by name; the arrays stay alive with the model.
class Tensors {
  public:
    explicit Tensors(const nb::dict& arrays) : arrays_(arrays) {}

    bool has(const std::string& name) const { return arrays_.contains(name.c_str()); }

    const float* floats(const std::string& name, int size) const {
        const auto array = nb::cast<Array<const float, 1>>(get(name));
        if (static_cast<int64_t>(array.shape(0)) != size) wrong(name);
        return array.data();
    }

    Linear matrix(const std::string& name, int outputs) const {
        const auto weights = nb::cast<Array<const int8_t, 2>>(get(name + ".weights"));
        Linear m;
        m.outputs = outputs;
        const int rows = m.strips() * 32;
        m.inputs = static_cast<int>(weights.shape(1) / 32);
        const auto address = reinterpret_cast<uintptr_t>(weights.data());
        if (static_cast<int>(weights.shape(0)) != m.strips() || weights.shape(1) % (32 * 64) != 0 ||
            address % 64 != 0)
            wrong(name);
        const auto offsets = nb::cast<Array<const int32_t, 1>>(get(name + ".offsets"));
        if (static_cast<int>(offsets.shape(0)) != rows) wrong(name);
        m.weights = weights.data();
        m.offsets = offsets.data();
        m.scales = floats(name + ".scales", rows);
        if (has(name + ".biases")) m.biases = floats(name + ".biases", rows);
        return m;
    }

  private:
    nb::handle get(const std::string& name) const {
        if (!has(name)) throw nb::value_error(("tensor " + name + " is missing").c_str());
        return arrays_[name.c_str()];
    }
    [[noreturn]] static void wrong(const std::string& name) {
        throw nb::value_error(("tensor " + name + " has the wrong shape").c_str());
    }

    const nb::dict& arrays_;
};

Model build(const nb::dict& sizes, const std::vector<int>& windows, const nb::dict& arrays) {
    const auto size = [&](const char* name) { return nb::cast<int>(sizes[name]); };
    Model m;
    Shape& s = m.shape;
    s.hidden = size("hidden");
    s.heads = size("heads");
    s.kv_heads = size("kv_heads");
    s.head_dim = size("head_dim");
    s.intermediate = size("intermediate");
    s.vocab = size("vocab");
    s.norm_eps = nb::cast<float>(sizes["norm_eps"]);
    const Tensors tensors(arrays);
    for (size_t i = 0; i < windows.size(); ++i) {
        const std::string at = "layers." + std::to_string(i) + ".";
        Layer layer;
        layer.window = windows[i];
        layer.attention_norm = tensors.floats(at + "attention_norm", s.hidden_pad());
        layer.mlp_norm = tensors.floats(at + "mlp_norm", s.hidden_pad());
        if (tensors.has(at + "query_norm")) {
            layer.query_norm = tensors.floats(at + "query_norm", s.head_pad());
            layer.key_norm = tensors.floats(at + "key_norm", s.head_pad());
        }
        layer.qkv = tensors.matrix(at + "qkv", (s.heads + 2 * s.kv_heads) * s.head_pad());
        layer.output = tensors.matrix(at + "output", s.hidden_pad());
        layer.gate_up = tensors.matrix(at + "gate_up", 2 * s.intermediate_pad());
        layer.down = tensors.matrix(at + "down", s.hidden_pad());
        m.layers.push_back(layer);
    }
    m.final_norm = tensors.floats("final_norm", s.hidden_pad());
    m.head = tensors.matrix("head", s.vocab);
    m.embedding = tensors.has("embedding.weights") ? tensors.matrix("embedding", s.vocab) : m.head;
    return m;
}

const Kernels& find_kernels(const std::string& name) {
    for (const Kernels* kernels : available_kernels())
        if (kernels->name == name) return *kernels;
    throw nb::value_error(("this machine does not run the kernels " + name).c_str());
}

class Runtime {
  public:
    Runtime(const nb::dict& sizes, const std::vector<int>& windows, nb::dict arrays,
            const std::string& kernels, int threads)
        : arrays_(arrays),
          runner_(build(sizes, windows, arrays), find_kernels(kernels), threads) {}

    Cache* open() const {
        return new Cache(runner_.model().shape, static_cast<int>(runner_.model().layers.size()));
    }

    void set_positions(Array<const float, 2> cosines, Array<const float, 2> sines) {
        const size_t half = runner_.model().shape.head_dim / 2;
        if (cosines.shape(1) != half || sines.shape(1) != half ||
            sines.shape(0) != cosines.shape(0))
            throw nb::value_error("cosines and sines have the wrong shape");
        cosines_ = cosines;
        sines_ = sines;
        runner_.set_positions(cosines.data(), sines.data(), static_cast<int>(cosines.shape(0)));
    }

    // tokens and parents of all sequences, one after the other; nodes[i] of them are caches[i]'s.
    void forward(const std::vector<Cache*>& caches, const std::vector<int>& nodes,
                 Array<const int32_t, 1> tokens, Array<const int32_t, 1> parents,
                 const std::vector<int>& wanted, Array<float, 2> logits, Array<float, 2> hidden) {
        std::vector<Request> requests;
        size_t rows = 0;
        if (nodes.size() != caches.size() || tokens.shape(0) != parents.shape(0))
            throw nb::value_error("each sequence has nodes, each node a token and a parent");
        for (size_t i = 0; i < caches.size(); ++i) {
            if (caches[i] == nullptr || nodes[i] < 1 || rows + nodes[i] > tokens.shape(0))
                throw nb::value_error("the nodes do not add up to the tokens");
            requests.push_back({caches[i], tokens.data() + rows, parents.data() + rows, nodes[i]});
            rows += nodes[i];
        }
        const Shape& s = runner_.model().shape;
        check_output(logits, wanted.size(), s.vocab);
        check_output(hidden, rows, s.hidden);
        const nb::gil_scoped_release release;
        runner_.forward(requests, wanted, logits.data(), hidden.data());
    }

    void project(Array<const float, 2> hidden, Array<float, 2> logits) {
        const Shape& s = runner_.model().shape;
        if (static_cast<int>(hidden.shape(1)) != s.hidden)
            throw nb::value_error("the hidden states have the wrong width");
        check_output(logits, hidden.shape(0), s.vocab);
        const nb::gil_scoped_release release;
        runner_.project(hidden.data(), static_cast<int>(hidden.shape(0)), logits.data());
    }

    void embed(Array<const int64_t, 1> tokens, Array<float, 2> out) const {
        check_output(out, tokens.shape(0), runner_.model().shape.hidden_pad());
        runner_.embed(tokens.data(), static_cast<int>(tokens.shape(0)), out.data());
    }

    int threads() const { return runner_.threads(); }
    const char* kernels() const { return runner_.kernels().name; }

  private:
    static void check_output(const Array<float, 2>& array, size_t rows, int width) {
        if (array.shape(0) != rows || static_cast<int>(array.shape(1)) != width)
            throw nb::value_error("an output has the wrong shape");
    }

    nb::dict arrays_;
    Array<const float, 2> cosines_, sines_;
    Runner runner_;
};

std::vector<std::string> kernel_names() {
    std::vector<std::string> names;
    for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
    return names;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The native CPU runtime; see outpace.runtimes.native.";
    m.def("kernel_names", kernel_names);
    nb::class_<Cache>(m, "Cache")
        .def_prop_ro("length", &Cache::length)
        .def_prop_ro("num_bytes", &Cache::bytes)
        .def("keep",
             [](Cache& cache, const std::vector<int>& path) {
                 cache.keep(path.data(), static_cast<int>(path.size()));
             })
        .def("truncate", &Cache::truncate);
    nb::class_<Runtime>(m, "Runtime")
        .def(nb::init<const nb::dict&, const std::vector<int>&, nb::dict, const std::string&, int>(),
             nb::arg("sizes"), nb::arg("windows"), nb::arg("arrays"), nb::arg("kernels"),
             nb::arg("threads"))
        .def("open", &Runtime::open, nb::rv_policy::take_ownership)
        .def("set_positions", &Runtime::set_positions)
        .def("forward", &Runtime::forward)
        .def("project", &Runtime::project)
        .def("embed", &Runtime::embed)
        .def_prop_ro("threads", &Runtime::threads)
        .def_prop_ro("kernels", &Runtime::kernels);
}
