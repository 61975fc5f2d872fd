// What llama.cpp makes of GGUF files: `node llama_cpp.mjs FOLDER` reads FOLDER/asked.json,
// {file: [{text} or {ids, count}]}, and prints the tokens of each text, and those that it adds to ids.
import {createRequire} from "node:module";
import fs from "node:fs";
import path from "node:path";
import {pathToFileURL} from "node:url";

const folder = process.argv[2];
const require = createRequire(path.join(process.env.LLAMA_CPP, "node_modules", "_.js"));
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(require.resolve("node-llama-cpp")).href);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error});
const exact = {flashAttention: false, experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32"};
const answers = {};
for (const [file, questions] of Object.entries(JSON.parse(fs.readFileSync(path.join(folder, "asked.json"))))) {
    const model = await llama.loadModel({modelPath: path.join(folder, file), gpuLayers: 0});
    const context = await model.createContext({contextSize: 128, threads: 1, ignoreMemorySafetyChecks: true, ...exact});
    const sequence = context.getSequence();
    const {shouldPrependBosToken: prepends, bos} = model.tokens;
    answers[file] = {
        chat: model.fileInfo.metadata.tokenizer.chat_template ?? null,
        eos: model.tokens.eos, eot: model.tokens.eot, answers: []
    };
    for (const {text, ids, count} of questions) {
        if (text !== undefined) {
            answers[file].answers.push([...(prepends ? [bos] : []), ...model.tokenize(text, false)]);
            continue;
        }
        const made = [];
        await sequence.clearHistory();
        for await (const token of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true})) {
            made.push(token);
            if (made.length === count)
                break;
        }
        answers[file].answers.push(made);
    }
    await context.dispose();
    await model.dispose();
}
fs.writeFileSync(path.join(folder, "answers.json"), JSON.stringify(answers));
process.exit(0);
