/* Links to a place of an index or of a long page, such as codes.html#md0301, go on to the page that
   has it. */
const place = document.getElementById(decodeURIComponent(window.location.hash.slice(1)));
const entry = place?.matches("a[id]:empty") && place.parentElement.querySelector("a[href]");
if (entry) window.location.replace(entry.href);
