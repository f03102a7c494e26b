// The dashboards of docs/*.json as Grafana's own panels draw them, from a Prometheus.
//
//   npm install --legacy-peer-deps react@18 react-dom@18 esbuild \
//     @grafana/ui@12.4.10 @grafana/data@12.4.10
//   npx esbuild draw_dashboards.tsx --bundle --outfile=page.js --define:global=window \
//     --loader:.svg=text --loader:.ttf=dataurl --loader:.woff2=dataurl
//
// Serve page.js, page.css, both dashboards and a page that has `<div id="root">` and
// those two files, and open it as ?dash=grafana-engine.json&prometheus=ADDRESS.
import React from 'react';
import { createRoot } from 'react-dom/client';
import { createTheme, dateTime, FieldType, getDisplayProcessor, ThemeContext, toDataFrame } from '@grafana/data';
import { GlobalStyles, PanelChrome, TimeSeries } from '@grafana/ui';

const query = new URLSearchParams(location.search);
const option = (name: string, other: string) => query.get(name) ?? other;
const theme = createTheme({ colors: { mode: option('mode', 'dark') as 'dark' | 'light' } });
const [width, row, gap, step] = [Number(option('width', '1280')), 30, 8, 5];
const until = Math.floor(Date.now() / 1000);
const since = until - 60 * Number(option('minutes', '10'));

async function ask(expression: string): Promise<any[]> {
  const range = `&start=${since}&end=${until}&step=${step}`;
  const address = option('prometheus', 'http://127.0.0.1:9090');
  const answer = await fetch(`${address}/api/v1/query_range?query=${encodeURIComponent(expression)}${range}`);
  const { status, data, error } = await answer.json();
  if (status !== 'success') throw new Error(`${expression}: ${error}`);
  return data.result;
}

async function framesOf(panel: any): Promise<any[]> {
  const frames: any[] = [];
  for (const { expr, legendFormat, refId } of panel.targets) {
    for (const { metric, values } of await ask(expr)) {
      const name = legendFormat.replace(/{{\s*(\w+)\s*}}/g, (_: string, key: string) => metric[key] ?? '');
      const known = new Map<number, number>(values.map(([at, value]: [number, string]) => [at, Number(value)]));
      const times = Array.from({ length: (until - since) / step + 1 }, (_, i) => since + i * step);
      const shown = times.map((at) => (Number.isNaN(known.get(at) ?? NaN) ? null : known.get(at)));
      frames.push(toDataFrame({ refId, name, fields: [
        { name: 'Time', type: FieldType.time, values: times.map((at) => 1000 * at) },
        { name: 'Value', type: FieldType.number, values: shown, config: { displayNameFromDS: name } },
      ] }));
    }
  }
  const { defaults } = panel.fieldConfig;
  const custom = { lineWidth: 1, showPoints: 'auto', ...defaults.custom };
  frames.forEach((frame, seriesIndex) => frame.fields.forEach((field: any) => {
    field.config = { color: { mode: 'palette-classic' }, ...defaults, ...field.config, custom };
    field.state = { seriesIndex, displayName: field.config.displayNameFromDS };
    field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' });
  }));
  return frames;
}

function Panel({ panel, frames }: { panel: any; frames: any[] }) {
  const { x, y, w, h } = panel.gridPos;
  const [left, top] = [(x * width) / 24 + gap / 2, y * (row + gap) + gap];
  const size = { width: (w * width) / 24 - gap, height: h * (row + gap) - gap };
  const timeRange: any = { from: dateTime(1000 * since), to: dateTime(1000 * until), raw: {} };
  const legend: any = { displayMode: 'list', placement: 'bottom', showLegend: true, calcs: [] };
  return (
    <div style={{ position: 'absolute', left, top, ...size }}>
      <PanelChrome title={panel.title} {...size}>
        {(innerWidth: number, innerHeight: number) => frames.length > 0
          ? <TimeSeries frames={frames} width={innerWidth} height={innerHeight} timeRange={timeRange}
              timeZone="utc" legend={legend} structureRev={1} options={{}} />
          : <>No data</>}
      </PanelChrome>
    </div>
  );
}

async function main() {
  const { panels } = await (await fetch(option('dash', 'grafana.json'))).json();
  const drawn = await Promise.all(panels.map(async (panel: any) => ({ panel, frames: await framesOf(panel) })));
  createRoot(document.getElementById('root')!).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ position: 'relative' }}>{drawn.map((each) => <Panel key={each.panel.id} {...each} />)}</div>
    </ThemeContext.Provider>,
  );
}

main().catch((error) => { document.body.innerText = String(error); });
