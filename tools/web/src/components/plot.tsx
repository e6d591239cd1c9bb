// A line plot over time with uPlot. Colours come from the style sheet, so that they follow light and dark.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";

export interface Line {
  label: string;
  values: (number | null)[];
}

interface Props {
  label: string;
  /** Unix times in seconds, or plain numbers with `numbers`. */
  x: number[];
  lines: Line[];
  /** Formats values of the left axis and the legend. */
  format: (value: number | null | undefined) => string;
  numbers?: boolean;
  /** The axis ends there in both directions, however large a value is. */
  most?: number;
  height?: number;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const WIDTHS = [2, 1.5, 1.5];

/** Steps of the left axis. Multiples of 2.5 would be rounded where counts have no decimals. */
const STEPS = Array.from({ length: 22 }, (_, power) => [1, 2, 5].map((digit) => Number(`${digit}e${power - 9}`))).flat();

function colour(element: Element, at: number): string {
  return getComputedStyle(element).getPropertyValue(`--line-${at % 4}`).trim();
}

function options(element: HTMLElement, props: Props): uPlot.Options {
  const style = getComputedStyle(element);
  const ink = style.getPropertyValue("--quiet").trim();
  const grid = { stroke: style.getPropertyValue("--rule").trim(), width: 1 };
  const times = (_plot: uPlot, ticks: number[]) => ticks.map((tick) => CLOCK.format(1000 * tick));
  const axis = { stroke: ink, grid, ticks: { ...grid, size: 4 }, font: "12px system-ui, sans-serif" };
  const below = { ...axis, size: 32 };
  return {
    width: element.clientWidth || 300,
    height: props.height ?? 180,
    legend: { show: true, live: false, markers: { fill: (_plot, at) => colour(element, at - 1) } },
    cursor: { drag: { x: false, y: false } },
    scales: { x: { time: !props.numbers }, y: { range: (_plot, low, high) => span(low, high, props.most ?? Infinity) } },
    axes: [props.numbers ? below : { ...below, values: times, space: 80 }, { ...axis, size: 72, space: 22, incrs: STEPS, values: (_plot, ticks) => ticks.map((tick) => props.format(tick)) }],
    series: [
      {},
      ...props.lines.map((line, at) => ({
        label: line.label,
        stroke: colour(element, at),
        width: WIDTHS[at] ?? 1.5,
        points: { show: Boolean(props.numbers) },
        value: (_plot: uPlot, value: number | null) => props.format(value),
      })),
    ],
  };
}

/** The ends of the left axis: zero is always on it. */
function span(low: number, high: number, most: number): [number, number] {
  const ends: [number, number] = [Math.max(-most, Math.min(0, 1.1 * low)), Math.min(most, Math.max(0, 1.1 * high))];
  return ends[0] < ends[1] ? ends : [0, 1];
}

export function Plot(props: Props) {
  const holder = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const names = props.lines.map((line) => line.label).join();
  const data = [props.x, ...props.lines.map((line) => line.values)] as uPlot.AlignedData;
  const newest = useRef(data);
  newest.current = data;

  useEffect(() => {
    const element = holder.current!;
    const draw = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(element, props), newest.current, element);
    };
    draw();
    const resized = new ResizeObserver(() => {
      plot.current?.setSize({ width: element.clientWidth, height: props.height ?? 180 });
    });
    resized.observe(element);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", draw);
    return () => {
      scheme.removeEventListener("change", draw);
      resized.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [names]);
  useEffect(() => plot.current?.setData(data));

  const last = props.lines.map((line) => `${line.label} ${props.format(line.values.at(-1))}`).join(", ");
  return <div ref={holder} class="plot" role="img" aria-label={`${props.label}. Now: ${last}`} />;
}
