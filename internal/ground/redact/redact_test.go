package redact

import (
	"encoding/base64"
	"encoding/json"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestRedactedForms(t *testing.T) {
	const password = `p"ss <wörd>/with & %all+of=it`
	const key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQEFAASC\n-----END KEY-----\n"
	secrets := map[string]string{"pin": "007", "eight": "8 digits", "short": "hunter", "long": "hunter2-and-more", "password": password, "key": key,
		"tokens": `{"vault":{"token":"eyJhbGciOi.J9-abc","expirationTimestamp":"2026-01-01T00:00:00Z"}}`}
	asJSON := check.Value(json.Marshal(map[string]string{"k": password}))(t)
	for name, test := range map[string]struct{ text, leak string }{
		"a secret that begins with another one": {"login hunter2-and-more failed", "2-and-more"},
		"as it is":                              {"login " + password + " failed", "ss <w"},
		"quoted":                                {"login " + strconv.Quote(password) + " failed", "ss <w"},
		"quoted as ASCII":                       {"login " + strconv.QuoteToASCII(password) + " failed", "ss <w"},
		"JSON":                                  {"sent " + string(asJSON), "with"},
		"a query":                               {"GET /?p=" + url.QueryEscape(password), "with"},
		"a path":                                {"GET /" + url.PathEscape(password), "with"},
		"base64":                                {"basic " + base64.StdEncoding.EncodeToString([]byte(password)), base64.StdEncoding.EncodeToString([]byte(password))[:20]},
		"base64 for URLs":                       {"basic " + base64.URLEncoding.EncodeToString([]byte(password)), base64.URLEncoding.EncodeToString([]byte(password))[:20]},
		"base64 behind a user":                  {base64.StdEncoding.EncodeToString([]byte("me:hunter2-and-more")), base64.StdEncoding.EncodeToString([]byte("me:hunter2-and-more"))[6:20]},
		"base64 behind a long user":             {base64.StdEncoding.EncodeToString([]byte("root:hunter2-and-more")), base64.StdEncoding.EncodeToString([]byte("root:hunter2-and-more"))[8:20]},
		"all lines in one":                      {"bad key " + strings.ReplaceAll(key, "\n", " "), "hkiG9w0"},
		"one of several tokens":                 {"401 for eyJhbGciOi.J9-abc", "eyJ"},
		"one line":                              {"line 2: hkiG9w0BAQEFAASC", "hkiG9w0"},
		"escaped line ends":                     {"bad key " + strconv.Quote(key), "MIIEvQ"},
		"cut within a secret":                   {"hunter2-and-more" + strings.Repeat(".", longestText-22) + password, password[:6]},
		"the shortest":                          {"pin 007", "007"},
		"base64 of the shortest":                {base64.StdEncoding.EncodeToString([]byte("8 digits")), base64.StdEncoding.EncodeToString([]byte("8 digits"))[:9]},
	} {
		t.Run(name, func(t *testing.T) {
			check.Require(t, strings.Contains(test.text, test.leak), "the test looks for %q, which is not in its text %q", test.leak, test.text)
			got := Secrets(test.text, secrets)
			check.That(t, !strings.Contains(got, test.leak), "%q was left in %q", test.leak, got)
			check.That(t, strings.Contains(got, "[redacted]"), "nothing is marked as redacted in %q", got)
		})
	}
}

func TestRedactLeavesOtherText(t *testing.T) {
	const text = "the volume vol-1 is of another zone: no such device"
	got := Secrets(strings.Repeat(".", longestText+1), nil)
	check.That(t, len(got) == longestText, "%d bytes are left of a long text", len(got))
	secrets := map[string]string{"empty": "", "two": "no", "lines": "a\n\nzone\nof"}
	got = Secrets(text, secrets)
	check.That(t, got == text, "%q became %q", text, got)
}
