package doctor

import (
	"bytes"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
)

// setting is one boolean of a TOML file and the line it is on.
type setting struct {
	// table is the dotted name of the table that holds the key.
	table string
	key   string
	value bool
	file  string
	line  int
}

// effective returns the booleans of TOML files, by the result of key for their table and key. A
// later file overrides an earlier one. failed is called for files that cannot be read.
func (n Node) effective(files []string, failed func(file string, err error)) map[string]setting {
	all := map[string]setting{}
	for _, file := range files {
		var settings []setting
		data, err := n.read(file)
		if err == nil {
			settings, err = booleans(file, data)
		}
		if err != nil {
			failed(file, err)
			continue
		}
		for _, s := range settings {
			all[key(s.table, s.key)] = s
		}
	}
	return all
}

func key(table, key string) string { return table + "\x00" + key }

// booleans finds every boolean of a TOML document, however it is written: below
// a table's heading, with a dotted key, or in an inline table.
func booleans(file string, data []byte) ([]setting, error) {
	var whole map[string]any
	if err := toml.Unmarshal(data, &whole); err != nil {
		return nil, err // the parser below is lenient: only this one knows the whole grammar
	}
	w := tomlWalk{file: file, data: data}
	w.parser.Reset(data)
	for w.parser.NextExpression() {
		w.expression(w.parser.Expression())
	}
	return w.found, w.parser.Error()
}

type tomlWalk struct {
	file   string
	data   []byte
	parser unstable.Parser
	table  []string
	found  []setting
}

func (w *tomlWalk) expression(node *unstable.Node) {
	switch node.Kind {
	case unstable.Table, unstable.ArrayTable:
		w.table, _ = keyOf(node)
	case unstable.KeyValue:
		w.keyValue(w.table, node)
	}
}

func (w *tomlWalk) keyValue(table []string, node *unstable.Node) {
	key, at := keyOf(node)
	full := append(append([]string{}, table...), key...)
	switch value := node.Value(); value.Kind {
	case unstable.Bool:
		last := len(full) - 1
		w.found = append(w.found, setting{
			table: strings.Join(full[:last], "."), key: full[last],
			value: string(value.Data) == "true", file: w.file, line: w.lineOf(at),
		})
	case unstable.InlineTable:
		for it := value.Children(); it.Next(); {
			if it.Node().Kind == unstable.KeyValue {
				w.keyValue(full, it.Node())
			}
		}
	}
}

// keyOf returns the parts of a key and the offset of its last part.
func keyOf(node *unstable.Node) (parts []string, offset uint32) {
	for it := node.Key(); it.Next(); {
		parts = append(parts, string(it.Node().Data))
		offset = it.Node().Raw.Offset
	}
	return parts, offset
}

func (w *tomlWalk) lineOf(offset uint32) int {
	return bytes.Count(w.data[:offset], []byte("\n")) + 1
}
