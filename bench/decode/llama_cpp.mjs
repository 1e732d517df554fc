// Answers requests with llama.cpp: one line of JSON in, {"prompts": [[1, 2]], "answers": [3]}, one line of JSON out, the tokens of
// each answer, greedily chosen. Arguments: the folder in which node-llama-cpp is installed, the model, the threads, its positions.
import {createInterface} from "node:readline";
import {resolve} from "node:path";
import {pathToFileURL} from "node:url";

const [folder, modelPath, threads, length] = process.argv.slice(2);
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(resolve(folder, "node_modules/node-llama-cpp/dist/index.js")));
const llama = await getLlama({gpu: false, build: "never", maxThreads: Number(threads), logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath});
const contexts = new Map();

async function sequencesFor(count) {
  if (!contexts.has(count)) {
    const options = {sequences: count, contextSize: Number(length), batchSize: 512, threads: Number(threads)};
    const context = await model.createContext(options);
    contexts.set(count, Array.from({length: count}, () => context.getSequence()));
  }
  return contexts.get(count);
}

async function answer(sequence, prompt, count) {
  const tokens = [];
  await sequence.clearHistory();
  for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
    tokens.push(token);
    if (tokens.length === count) break;
  }
  return tokens;
}

for await (const line of createInterface({input: process.stdin})) {
  const {prompts, answers} = JSON.parse(line);
  const sequences = await sequencesFor(prompts.length);
  const found = await Promise.all(prompts.map((prompt, i) => answer(sequences[i], prompt, answers[i])));
  process.stdout.write(JSON.stringify(found) + "\n");
}
process.exit(0);
