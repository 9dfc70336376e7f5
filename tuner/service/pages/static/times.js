// Writes every moment in the viewer's own zone; UTC stays on hover. Without this script pages show UTC.
"use strict";
globalThis.localTimes = (root) => {
  const options = { dateStyle: "medium", timeStyle: "short" };
  const format = new Intl.DateTimeFormat(undefined, options);
  for (const each of root.querySelectorAll("time[datetime]")) {
    const moment = new Date(each.dateTime);
    if (!Number.isNaN(moment.valueOf())) {
      each.textContent = format.format(moment);
    }
  }
};
globalThis.localTimes(document);
