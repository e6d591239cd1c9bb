// The entry: mounts the dashboard, or the chat, as the document says.

import "uplot/dist/uPlot.min.css";
import "./style.css";
import "./steps/steps.css";
import "./chat/chat.css";
import { render } from "preact";
import { App } from "./app";
import { Chat } from "./chat/chat";

const root = document.getElementById("app")!;
render(root.dataset.page === "chat" ? <Chat /> : <App />, root);
