// Compute llama.cpp's logits: `llama-logits MODEL TOKENS THREADS`.
//
// Reads pieces of TOKENS token ids (int32) from stdin, each a text of its own, and writes for each piece TOKENS x V
// logits (float32), those after every token.

#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char ** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "error: llama-logits MODEL TOKENS THREADS\n");
        return 2;
    }
    const int num_tokens = std::atoi(argv[2]);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (model == nullptr) {
        std::fprintf(stderr, "error: %s cannot be loaded\n", argv[1]);
        return 1;
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = num_tokens;
    params.n_threads = params.n_threads_batch = std::atoi(argv[3]);
    llama_context * context = llama_init_from_model(model, params);
    if (context == nullptr) {
        std::fprintf(stderr, "error: no context of %d tokens\n", num_tokens);
        return 1;
    }
    const size_t num_logits = (size_t) num_tokens * llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<llama_token> tokens(num_tokens);
    llama_batch batch = llama_batch_init(num_tokens, 0, 1);
    while (std::fread(tokens.data(), sizeof(llama_token), num_tokens, stdin) == (size_t) num_tokens) {
        llama_memory_clear(llama_get_memory(context), true);
        for (int i = 0; i < num_tokens; ++i) {
            batch.token[i] = tokens[i];
            batch.pos[i] = i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = 1;
        }
        batch.n_tokens = num_tokens;
        if (llama_decode(context, batch) != 0) {
            std::fprintf(stderr, "error: llama_decode failed\n");
            return 1;
        }
        std::fwrite(llama_get_logits(context), sizeof(float), num_logits, stdout);
        std::fflush(stdout);
    }
    return 0;
}
