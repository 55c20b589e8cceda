// A store: what is known of all items, beside the findings.

function showStore({ facts, origin, shards, nShards, skipped, nSkipped }) {
  const sheet = (title, ...nodes) =>
    element("details", { class: "more" }, element("summary", {}, title), ...nodes.filter(Boolean));
  const rest = (shown, all) =>
    shown < all ? quietParagraph(`and ${(all - shown).toLocaleString("en")} more`) : null;
  const isRagged = shards.some(([, items, rows]) => items !== rows);
  const lines = shards.map(([file, items, rows, size]) => {
    const counts = isRagged ? [items, rows] : [items];
    return [file, ...counts.map((number) => number.toLocaleString("en")), size];
  });
  const titles = ["File", "Items", ...(isRagged ? ["Tokens"] : []), "Size"];
  byId("store").append(
    ...[
      numbersList(facts),
      nSkipped
        ? sheet(
            `${pluralText(nSkipped, "item")} skipped`,
            smallTable(
              ["Item", "Why"],
              skipped.map(([item, why]) => [item.toLocaleString("en"), why]),
            ),
            rest(skipped.length, nSkipped),
          )
        : null,
      sheet(pluralText(nShards, "shard"), smallTable(titles, lines), rest(shards.length, nShards)),
      sheet(
        "Origin",
        numbersList(origin.map(([name, text]) => [name, text, false, text.length > 12])),
      ),
    ].filter(Boolean),
  );
}
