/* Links into the pages that once had every operator and every diagnostic, such as
   codes.html#md0301, go on to the page that the entry has now. */
const place = document.getElementById(decodeURIComponent(window.location.hash.slice(1)));
const entry = place?.matches("td a[id]") && place.parentElement.querySelector("a[href]");
if (entry) window.location.replace(entry.href);
